"""What a stack of ours does to signals and gradients at initialisation, from its weights and its wiring."""

from __future__ import annotations

import torch

from normwise.blocks import ACTIVATIONS, MLP, Attention, Layer, Residual, Stack
from normwise.theory._branches import AttentionBranch, Branch, MLPBranch, sigma, visible
from normwise.theory._moments import ASSUMPTIONS, Norm, Prediction, Sublayer, forecast, moments_of

__all__ = ["ASSUMPTIONS", "Prediction", "predict"]


@torch.inference_mode(False)  # slopes are taken by differentiating
def predict(stack: Stack, x: torch.Tensor) -> Prediction:
    """Return what is expected of a stack of ours that is given ``x``; see ``predict_traced`` for any other model.

    Args:
        stack: the layers, with their weights.
        x: [B, T, H], what enters: the size and the correlation of its tokens are measured.

    Raises:
        ValueError: two streams, or sublayers that read a memory.
    """
    if stack.placement.streams != 1:
        raise ValueError(f"placement {stack.placement.name!r} has two streams; predictions are of one")
    steps, width = x.shape[-2:]
    layers = [_layer(layer, steps, width) for layer in stack.layers if isinstance(layer, Layer)]
    return forecast(layers, moments_of(x), width)


def _layer(layer: Layer, steps: int, width: int) -> list[Sublayer]:
    if "cross" in layer.names:
        raise ValueError("a sublayer reads a memory; predictions are of one stream")
    return [_sublayer(residual, layer.norm, steps, width) for _, residual in layer.residuals()]


def _sublayer(residual: Residual, shared: torch.nn.Module | None, steps: int, width: int) -> Sublayer:
    wiring = residual.wiring
    return Sublayer(
        branch=_branch(residual.sublayer, steps),
        before=_norm(shared if wiring.shares_norm else residual.before, width),
        after_branch=_norm(residual.after_branch, width),
        after_add=_norm(residual.after_add, width),
        input_gain=wiring.input_scale**2,
        branch_gain=wiring.branch_scale**2 * _square(residual.branch_gain),
        skip_gain=wiring.skip_scale**2 * _square(residual.skip_gain),
        parallel=wiring.parallel,
        adds_block_input=wiring.adds_block_input,
    )


def _square(gain: torch.Tensor | None) -> float:
    """Return the mean square of a learned factor; 1 without one."""
    return 1.0 if gain is None else float(gain.detach().double().pow(2).mean())


def _norm(norm: torch.nn.Module | None, width: int) -> Norm | None:
    spec = getattr(norm, "spec", None)
    return None if spec is None else Norm.of(spec, getattr(norm, "weight", None), width)


def _branch(sublayer: torch.nn.Module, steps: int) -> Branch:
    """Return what moments see of a sublayer, for sequences of ``steps``."""
    if isinstance(sublayer, MLP):
        return MLPBranch(
            activation=ACTIVATIONS[sublayer.activation][0],
            up=sigma(sublayer.up.weight),
            down=sigma(sublayer.down.weight),
            gate=0.0 if sublayer.gate is None else sigma(sublayer.gate.weight),
            inner_norm=sublayer.norm is not None,
        )
    if not isinstance(sublayer, Attention):
        raise ValueError(f"predictions are of attention and MLPs, not of {type(sublayer).__name__}")
    return AttentionBranch(
        visible=visible(steps, causal=sublayer.causal, window=sublayer.window),
        query=sigma(sublayer.q.weight),
        key=sigma(sublayer.k.weight),
        value=sigma(sublayer.v.weight),
        out=sigma(sublayer.out.weight),
        scale=sublayer.scale * sublayer.head_dim**0.5,
        qk_norm=sublayer.qk_norm is not None or "q" in sublayer.norms,
        value_norm="v" in sublayer.norms,
        inner_norm=sublayer.inner_norm is not None,
    )
