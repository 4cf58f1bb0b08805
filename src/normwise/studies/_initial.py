"""What a stack at initialisation does to signals and gradients, by depth: measured, with the prediction beside it.

B batch, T time, H hidden, L layers. Sequences are bytes of the standard library; the loss is the next byte's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from normwise import placements
from normwise.blocks import MLP, Attention, Layer, Stack, norm_maker
from normwise.models import initialise
from normwise.spec import Wiring
from normwise.studies._corpus import VOCABULARY, corpus
from normwise.studies._depth import token_cosine
from normwise.studies._study import Params
from normwise.theory import Prediction, predict

__all__ = ["HEADS", "LENGTH", "WINDOWS", "Walk", "fresh", "places", "through", "walk"]

HEADS, LENGTH, WINDOWS = 4, 64, 8  # heads of attention; bytes of a window; windows of the batch
_MOST_PLACES = 24  # of a curve, beside its start
_EMBEDDINGS = {"unit": (1.0, 0.0), "gpt-2": (0.02, 0.02)}  # standard deviations of tokens and positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What was measured of a stack, and what was predicted of it.

    Lists of places begin with the stream that enters the first layer and end with the one that leaves the last, before
    a final norm; lists of sublayers have 2 L entries, lists of layers L.
    """

    q: list[float]  # places: second moment per feature, mean over tokens
    rho: list[float]  # places: mean correlation of different tokens of a window
    before: list[float]  # sublayers: second moment of the stream beside the branch, a constant on it included
    branch: list[float]  # sublayers: second moment of the branch as it is added, v
    added: list[float]  # sublayers: of the stream after the add, before a norm that follows
    gradient: list[float]  # places: root mean square of the loss's gradient
    token_gradient: list[float]  # places: the same of the median token
    first_share: list[float]  # places: share of the gradient's energy on position 0
    down: list[float]  # layers: Frobenius norm of the gradient of the MLP's last matrix, W_2
    query: list[float]  # layers: the same of W_Q
    told: Prediction


def places(depth: int) -> list[int]:
    """Return the numbers of the layers after which a curve is kept, 0 for the stream that enters."""
    return list(range(0, depth + 1, max(1, depth // _MOST_PLACES)))


def fresh(params: Params) -> Stack:
    """Return a stack as ``params`` say: placement, init, mlp, depth, width and, optionally, kinds and causal.

    ``kinds`` are the sublayers of a layer, "attention" and "mlp" by default.
    """
    width, norm = params["width"], norm_maker("layer")

    def attention(layer: int, wiring: Wiring) -> nn.Module:
        return Attention(width, HEADS, norm=norm, causal=params.get("causal", True), layer=layer)

    def mlp(layer: int, wiring: Wiring) -> nn.Module:
        return MLP(width, 4 * width, params["mlp"], bias=False)

    makers = {"attention": attention, "mlp": mlp}
    kinds = params.get("kinds", list(makers))
    placement = placements.get(params["placement"])
    stack = Stack(params["depth"], width, {kind: makers[kind] for kind in kinds}, placement=placement, norm=norm)
    initialise(stack, params["init"])
    return stack


def through(params: Params, *, windows: int = WINDOWS, backward: bool = True) -> Walk:
    """Build a stack with the seed of ``params`` and walk it: ``embeddings`` is "unit", N(0, 1), or "gpt-2".

    Backward in float64: gradients of W_Q are differences of nearly equal numbers, and float32 ends at 1e-7.
    """
    dtype = torch.float64 if backward else torch.float32
    torch.manual_seed(params["seed"])
    stack = fresh(params).to(dtype)
    tokens, positions = _EMBEDDINGS[params["embeddings"]]
    ids = corpus().batch(windows, LENGTH, torch.Generator().manual_seed(params["seed"]))
    table = torch.randn(VOCABULARY, params["width"], dtype=dtype) * tokens
    x = table[ids[:, :-1]] + torch.randn(LENGTH, params["width"], dtype=dtype) * positions
    head = torch.randn(VOCABULARY, params["width"], dtype=dtype) * params["width"] ** -0.5
    return walk(stack, x, head, ids[:, 1:], backward=backward)


def walk(stack: Stack, x: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, *, backward: bool = True) -> Walk:
    """Run a stack of one stream, sublayers one after the other, forward and back from the mean cross-entropy.

    Args:
        stack: with its weights.
        x: [B, T, H], what enters.
        head: [V, H], makes logits.
        targets: [B, T].
        backward: without it there are no gradients, and their lists are empty.
    """
    told = predict(stack, x)
    with torch.set_grad_enabled(backward):
        return _walk(stack, x.detach().requires_grad_(backward), head, targets, told)


def _walk(stack: Stack, x: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, told: Prediction) -> Walk:
    streams, before, branch, added = [x], [], [], []
    for layer in stack.layers:
        assert isinstance(layer, Layer)
        assert not layer.parallel
        entered = x
        for _, residual in layer.residuals():
            arriving = residual.branch(x)
            skip = x * residual.wiring.skip_scale
            before.append(_square(skip))
            branch.append(_square(arriving))
            added.append(_square(skip + arriving))
            x = residual.close(x, arriving, entered)
        streams.append(x)
    if x.requires_grad:
        for stream in streams:
            stream.retain_grad()
        left = x if stack.final_norm is None else stack.final_norm(x)
        F.cross_entropy((left @ head.T).flatten(0, 1), targets.flatten()).backward()
    energies = [stream.grad.double().pow(2).mean(-1) for stream in streams if stream.grad is not None]
    return Walk(
        q=[_square(stream) for stream in streams],
        rho=[token_cosine(stream.detach()) for stream in streams],
        before=before,
        branch=branch,
        added=added,
        gradient=[float(energy.mean().sqrt()) for energy in energies],
        token_gradient=[float(energy.median().sqrt()) for energy in energies],
        first_share=[float(energy[:, 0].sum() / energy.sum()) for energy in energies],
        down=_norms(stack, "mlp", "down"),
        query=_norms(stack, "attention", "q"),
        told=told,
    )


def _square(x: torch.Tensor) -> float:
    return float(x.detach().double().pow(2).mean())


def _norms(stack: Stack, kind: str, role: str) -> list[float]:
    found = [
        getattr(residual.sublayer, role).weight.grad
        for layer in stack.layers
        if isinstance(layer, Layer)
        for name, residual in layer.residuals()
        if name == kind
    ]
    return [float(gradient.double().norm()) for gradient in found if gradient is not None]
