"""LayerNorm to RMSNorm in a decoder of ours, by hand: the naive swap, and the one that recentres the writers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from normwise.blocks import MLP, Attention, Residual
from normwise.layers import LayerNorm, RMSNorm
from normwise.models import Decoder

__all__ = ["naive", "recentred", "with_norms"]

NORMS = (LayerNorm, RMSNorm)


def with_norms(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return the model with every norm replaced by what ``make`` makes of it, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, NORMS):
                setattr(parent, name, make(child))
    return model


def naive(model: Decoder) -> Decoder:
    """Return a copy in which each LayerNorm is an RMSNorm with its gain and bias, and nothing else is changed."""
    changed = copy.deepcopy(model)
    with_norms(changed, _as_rms)
    return changed


@torch.no_grad()
def recentred(model: Decoder) -> Decoder:
    """Return a copy with RMSNorm whose writers to the stream have a mean of zero over the features.

    Writers are the embeddings and the last matrix of every branch, with its bias. The gain and the bias of a norm that
    only a branch or the head reads are folded into the matrices that read it; the head gets a weight of its own. Those
    of norms on the stream itself (Post-Norm) have to stay.
    """
    changed = copy.deepcopy(model)
    old = changed.head
    changed.head = nn.Linear(old.in_features, old.out_features, dtype=old.weight.dtype)
    changed.head.weight.copy_(old.weight)
    changed.head.bias.copy_(torch.zeros_like(changed.head.bias) if old.bias is None else old.bias)
    for table in (changed.embedding.tokens, changed.embedding.positions):
        if table is not None:
            table.weight.sub_(table.weight.mean(1, keepdim=True))
    for residual in changed.modules():
        if isinstance(residual, Residual):
            writer, readers = _ends(residual.sublayer)
            writer.weight.sub_(writer.weight.mean(0, keepdim=True))
            writer.bias.sub_(writer.bias.mean())
            if isinstance(residual.before, LayerNorm):
                _fold(residual.before, readers)
    if isinstance(changed.stack.final_norm, LayerNorm):
        _fold(changed.stack.final_norm, [changed.head])
    with_norms(changed, _as_rms)
    return changed


def _ends(sublayer: nn.Module) -> tuple[nn.Linear, list[nn.Linear]]:
    """Return the matrix that writes to the stream, and those that read it."""
    if isinstance(sublayer, Attention):
        return sublayer.out, [sublayer.q, sublayer.k, sublayer.v]
    assert isinstance(sublayer, MLP)
    return sublayer.down, [sublayer.up] if sublayer.gate is None else [sublayer.gate, sublayer.up]


def _fold(norm: LayerNorm, readers: list[nn.Linear]) -> None:
    assert norm.weight is not None
    assert norm.bias is not None
    for reader in readers:
        reader.bias.add_(reader.weight @ norm.bias)
        reader.weight.mul_(norm.weight)
    norm.reset_parameters()


def _as_rms(norm: nn.Module) -> nn.Module:
    assert isinstance(norm, LayerNorm)
    made = RMSNorm(norm.normalized_shape, norm.eps, bias=True)
    made.load_state_dict(norm.state_dict())
    return made.to(norm.state_dict()["weight"].dtype)
