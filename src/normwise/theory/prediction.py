"""What a stack does to signals and gradients at initialisation, from its weights and its wiring.

Second moments of the stream between tokens, P, go forward through every sublayer, those of its gradient, K, backward;
both are [T, T] matrices, for attention treats positions differently. No parameter is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from normwise.blocks import Layer, Residual, Stack
from normwise.spec import Wiring
from normwise.theory._branches import Branch, branch_of, correlation

__all__ = ["ASSUMPTIONS", "Prediction", "predict"]

ASSUMPTIONS = (
    "at initialisation: weights are independent, centred, and of the data",
    "shifts are 0 and gains of norms are equal within a norm; eps is negligible",
    "no dropout",
    "a branch is uncorrelated with the stream",
    "attention is uniform over the keys a query sees, with scores that are normal around that",
    "gradients meet weights as if they were drawn anew",
    "wide: a single net strays by about sqrt(2 rho / H) from these means, relative",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected; lists begin with the stream that enters the first layer where they say so.

    Args:
        q: second moment of the stream per feature, entering and after each sublayer.
        rho: mean correlation of different tokens, the same.
        branch: second moment of each branch as it is added, v.
        gradient: root mean square of the gradient on the stream, relative to that at the end, the same places as q.
        token_gradient: the same for the median token.
        first_token: share of the gradient's energy on position 0, the same.
        block_influence: 1 - cos(x_l, x_{l+1}) of each layer, mean over tokens.
        path_angle: the sum over layers of arccos cos / pi.
        error: relative standard deviation of q of one net.
        assumptions: under which all of this holds.
    """

    q: tuple[float, ...]
    rho: tuple[float, ...]
    branch: tuple[float, ...]
    gradient: tuple[float, ...]
    token_gradient: tuple[float, ...]
    first_token: tuple[float, ...]
    block_influence: tuple[float, ...]
    path_angle: float
    error: tuple[float, ...]
    assumptions: tuple[str, ...] = ASSUMPTIONS


@dataclass(slots=True)
class _Step:
    """A sublayer on the stream: what it saw, and what it made of it."""

    wiring: Wiring
    branch: Branch
    entered: torch.Tensor  # P of the stream before
    given: torch.Tensor  # P of what the sublayer got
    returned: torch.Tensor  # P of what it returned
    added: torch.Tensor  # P after the add, before a norm
    skip: float
    scale: float  # of the branch, times the gain of its norm
    input_gain: float
    after_gain: float


def predict(stack: Stack, x: torch.Tensor) -> Prediction:
    """Return what is expected of a stack of ours that is given ``x``.

    Args:
        stack: the layers, with their weights.
        x: [B, T, H], what enters: the size and the correlation of its tokens are measured.

    Raises:
        ValueError: two streams, or sublayers that read a memory.
    """
    if stack.placement.streams != 1:
        raise ValueError(f"placement {stack.placement.name!r} has two streams; predictions are of one")
    rows = x.detach().double()
    moments = (rows @ rows.transpose(-1, -2)).mean(0) / rows.shape[-1]
    width, steps = rows.shape[-1], rows.shape[-2]
    walked: list[_Step] = []
    q, influence = [moments], []
    for layer in stack.layers:
        assert isinstance(layer, Layer)
        moments, cosine, taken = _layer(layer, moments, steps)
        walked += taken
        q += [step.added if not step.wiring.after_add else correlation(step.added) * step.after_gain for step in taken]
        influence.append(1 - cosine)
    rho = [_mean_correlation(p) for p in q]
    gradients = _backward(walked, steps)
    return Prediction(
        q=tuple(float(p.diagonal().mean()) for p in q),
        rho=tuple(rho),
        branch=tuple(float(step.returned.diagonal().mean()) * step.scale for step in walked),
        gradient=tuple(_root(k.diagonal().mean()) for k in gradients),
        token_gradient=tuple(_root(k.diagonal().median()) for k in gradients),
        first_token=tuple(float(k[0, 0] / k.diagonal().sum()) for k in gradients),
        block_influence=tuple(influence),
        path_angle=sum(math.acos(max(-1.0, min(1.0, 1 - each))) for each in influence) / math.pi,
        error=tuple(math.sqrt(2 * max(0.0, each) / width) for each in rho),
    )


def _root(value: torch.Tensor) -> float:
    return float(value.clamp_min(0).sqrt())


def _mean_correlation(moments: torch.Tensor) -> float:
    size = len(moments)
    if size < 2:
        return 1.0
    each = correlation(moments)
    return float((each.sum() - each.diagonal().sum()) / (size * (size - 1)))


def _square(gain: torch.Tensor | None, offset: float = 0.0) -> float:
    """Return the mean square of a gain; 1 without one."""
    return 1.0 if gain is None else float((gain.detach().double() + offset).pow(2).mean())


def _norm_square(norm: torch.nn.Module | None) -> float:
    if norm is None:
        return 1.0
    spec = getattr(norm, "spec", None)
    return _square(getattr(norm, "weight", None), 0.0 if spec is None else spec.weight_offset)


def _layer(layer: Layer, moments: torch.Tensor, steps: int) -> tuple[torch.Tensor, float, list[_Step]]:
    """Return moments after a layer, the mean cosine of what entered and left, and its steps."""
    entered, cross = moments, moments  # cross: moments between the stream and what entered
    taken: list[_Step] = []
    for _, residual in layer.residuals():
        wiring = residual.wiring
        source = entered if wiring.parallel else moments
        norm = layer.norm if wiring.shares_norm else residual.before
        gain = wiring.input_scale**2 * _norm_square(norm)
        given = (correlation(source) if norm is not None else source) * gain
        branch = branch_of(residual.sublayer, steps)
        returned = branch.forward(given)
        scale = _scale(residual)
        skip = wiring.skip_scale**2 * _square(residual.skip_gain)
        arrived = (correlation(returned) if wiring.after_branch else returned) * scale
        added, cross = moments * skip + arrived, cross * math.sqrt(skip)
        if wiring.adds_block_input:
            added, cross = added + cross + cross.T + entered, cross + entered
        after = _norm_square(residual.after_add)
        taken.append(
            _Step(wiring, branch, source, given, returned, added, skip, scale, gain, after),
        )
        moments = added
        if wiring.after_add:
            size = added.diagonal().sqrt()
            moments, cross = correlation(added) * after, cross / size[:, None] * math.sqrt(after)
    cosine = cross.diagonal() / (entered.diagonal() * moments.diagonal()).clamp_min(1e-300).sqrt()
    return moments, float(cosine.mean()), taken


def _scale(residual: Residual) -> float:
    return residual.wiring.branch_scale**2 * _square(residual.branch_gain) * _norm_square(residual.after_branch)


def _backward(walked: list[_Step], steps: int) -> list[torch.Tensor]:
    """Return K at every place of the stream, from an upstream gradient that is independent between tokens."""
    gradient = torch.eye(steps, dtype=torch.float64)
    found, upstream = [gradient], gradient
    for index in reversed(range(len(walked))):
        step = walked[index]
        wiring = step.wiring
        last = index + 1 == len(walked) or walked[index + 1].entered is not step.entered
        if not wiring.parallel or last:  # sublayers side by side all get what comes back to their layer
            upstream = gradient
        if wiring.after_add:
            gradient = _through_norm(gradient, step.added) * step.after_gain
        branch = (upstream if wiring.parallel else gradient) * step.scale
        if wiring.after_branch:
            branch = _through_norm(branch, step.returned)
        branch = step.branch.backward(step.given, branch) * step.input_gain
        if wiring.before:
            branch = _through_norm(branch, step.entered)
        gradient = gradient * step.skip + branch
        found.append(gradient)
    return found[::-1]


def _through_norm(gradient: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Return the gradient before a norm: divided by the tokens' sizes.

    The norm also removes one direction of H (LayerNorm two), which is left out: norms in a row remove nearly the same.
    """
    size = moments.diagonal().clamp_min(1e-300).sqrt()
    return gradient / (size[:, None] * size[None, :])
