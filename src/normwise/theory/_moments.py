"""The recursions of second moments through a stack, forward and backward: of descriptions, whatever they are of.

Second moments of the stream between tokens, P, go forward through every sublayer, those of its gradient, K, backward;
both are [T, T] matrices, for attention treats positions differently. No parameter is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from normwise.spec import NormSpec, Statistic, reference
from normwise.spec.definition import eps_of
from normwise.theory._branches import Branch, correlation

__all__ = ["ASSUMPTIONS", "Norm", "Prediction", "Sublayer", "forecast", "moments_of"]

ASSUMPTIONS = (
    "at initialisation: weights are independent, centred, and of the data",
    "shifts are 0 and gains of norms are equal within a norm",
    "no dropout",
    "a branch is uncorrelated with the stream",
    "attention is uniform over the keys a query sees, with scores that are normal around that",
    "gradients meet weights as if they were drawn anew",
    "the gradient at the end is independent between tokens",
    "wide: a single net strays by about sqrt(2 rho / H) from these means, relative",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected; lists begin with the stream that enters the first layer where they say so.

    Args:
        q: second moment of the stream per feature, entering and after each sublayer.
        rho: mean correlation of different tokens, the same.
        branch: second moment of each branch as it is added, v.
        added: second moment of the stream after each add, before a norm that follows it.
        gradient: root mean square of the gradient on the stream, relative to that at the end, the same places as q.
        token_gradient: the same for the median token.
        first_token: share of the gradient's energy on position 0, the same.
        added_gradient: root mean square of the gradient after each add, relative to that at the end.
        block_influence: 1 - cos(x_l, x_{l+1}) of each layer, mean over tokens.
        path_angle: the sum over layers of arccos cos / pi.
        error: relative standard deviation of q of one net.
        assumptions: under which all of this holds.
    """

    q: tuple[float, ...]
    rho: tuple[float, ...]
    branch: tuple[float, ...]
    added: tuple[float, ...]
    gradient: tuple[float, ...]
    token_gradient: tuple[float, ...]
    first_token: tuple[float, ...]
    added_gradient: tuple[float, ...]
    block_influence: tuple[float, ...]
    path_angle: float
    error: tuple[float, ...]
    assumptions: tuple[str, ...] = ASSUMPTIONS


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm on the stream or on a branch, as second moments see it.

    Args:
        square: mean square of what it makes of rows that are not small, its gain and its convention in it.
        eps: what is added to the second moment of a row.
    """

    square: float = 1.0
    eps: float = 0.0

    @classmethod
    def of(cls, spec: NormSpec, weight: torch.Tensor | None, width: int) -> Norm:
        """Return what a norm over features is, from its spec and its gain.

        Raises:
            ValueError: its spec names no formula, or needs more than a gain.
        """
        row = torch.ones(1, width, dtype=torch.float64)
        row[:, 1::2] = -1.0
        gain = None if weight is None else weight.detach().double().cpu()
        square = reference(replace(spec, eps=0.0, bias=False), row, gain).pow(2).mean()
        eps = eps_of(spec, torch.float32) if spec.eps_inside and not spec.eps_clamp else 0.0
        return cls(float(square), eps / width if spec.statistic is Statistic.L2 else eps)

    def __call__(self, moments: torch.Tensor) -> torch.Tensor:
        """Return P behind the norm: divided by the sizes of both tokens."""
        return moments * self._factors(moments)

    def backward(self, gradient: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
        """Return K before the norm, for P before it.

        The norm also removes one direction of H (LayerNorm two), which is left out: norms in a row remove nearly the
        same.
        """
        return gradient * self._factors(moments)

    def _factors(self, moments: torch.Tensor) -> torch.Tensor:
        each = self.factor(moments)
        return each[:, None] * each[None, :]

    def factor(self, moments: torch.Tensor) -> torch.Tensor:
        """Return what each token is multiplied by, [T], for P before the norm."""
        return self.square**0.5 * (moments.diagonal() + self.eps).clamp_min(1e-300).rsqrt()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    """A sublayer on the stream, as second moments see it.

    x' = after_add( skip x + branch after_branch( F( input before(x) ) ) ), see ``normwise.spec.Wiring``; constants and
    learned factors are here by their mean squares.

    Args:
        branch: F.
        before: the norm before it; None: none stands there.
        after_branch: the norm on what it returns.
        after_add: the norm after the add.
        input_gain: mean square of the factors on what enters F.
        branch_gain: the same on the branch as it is added.
        skip_gain: the same on the stream beside it.
        parallel: it reads what the sublayer before it in its layer read, and is added beside that one.
        adds_block_input: what entered the layer is added once more.
    """

    branch: Branch
    before: Norm | None = None
    after_branch: Norm | None = None
    after_add: Norm | None = None
    input_gain: float = 1.0
    branch_gain: float = 1.0
    skip_gain: float = 1.0
    parallel: bool = False
    adds_block_input: bool = False

    def arrive(self, returned: torch.Tensor) -> torch.Tensor:
        """Return P of the branch as it is added, for P of what F returns."""
        return (returned if self.after_branch is None else self.after_branch(returned)) * self.branch_gain


@dataclass(slots=True)
class _Step:
    """What a sublayer saw, and what was made of it."""

    of: Sublayer
    entered: torch.Tensor  # P of the stream before
    given: torch.Tensor  # P of what the sublayer got
    returned: torch.Tensor  # P of what it returned
    added: torch.Tensor  # P after the add, before a norm
    left: torch.Tensor  # P after the norm
    opens: bool  # a layer


def moments_of(rows: torch.Tensor) -> torch.Tensor:
    """Return second moments between tokens, per feature, [T, T], of a stream [B, T, H]."""
    rows = rows.detach().double()
    return (rows @ rows.transpose(-1, -2)).mean(0) / rows.shape[-1]


def forecast(layers: Sequence[Sequence[Sublayer]], moments: torch.Tensor, width: int) -> Prediction:
    """Return what is expected of layers that are given a stream.

    Args:
        layers: the sublayers of each, in their order.
        moments: [T, T], second moments per feature of what enters.
        width: H.
    """
    q, influence = [moments], list[float]()
    walked: list[_Step] = []
    for sublayers in layers:
        cosine, taken = _layer(sublayers, q[-1])
        walked += taken
        q += [step.left for step in taken]
        influence.append(1 - cosine)
    rho = [_mean_correlation(p) for p in q]
    gradients, at_adds = _backward(walked, len(moments))
    return Prediction(
        q=tuple(float(p.diagonal().mean()) for p in q),
        rho=tuple(rho),
        branch=tuple(float(step.of.arrive(step.returned).diagonal().mean()) for step in walked),
        added=tuple(float(step.added.diagonal().mean()) for step in walked),
        gradient=tuple(_root(k.diagonal().mean()) for k in gradients),
        token_gradient=tuple(_root(k.diagonal().median()) for k in gradients),
        first_token=tuple(float(k[0, 0] / k.diagonal().sum()) for k in gradients),
        added_gradient=tuple(_root(k.diagonal().mean()) for k in at_adds),
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


def _layer(sublayers: Sequence[Sublayer], moments: torch.Tensor) -> tuple[float, list[_Step]]:
    """Return the mean cosine of what entered a layer and what left, and its steps."""
    entered, cross = moments, moments  # cross: moments between the stream and what entered
    taken: list[_Step] = []
    for each in sublayers:
        source = taken[-1].entered if each.parallel and taken else moments
        given = (source if each.before is None else each.before(source)) * each.input_gain
        returned = each.branch.forward(given)
        added, cross = moments * each.skip_gain + each.arrive(returned), cross * math.sqrt(each.skip_gain)
        if each.adds_block_input:
            added, cross = added + cross + cross.T + entered, cross + entered
        moments = added
        if each.after_add is not None:
            moments = each.after_add(added)
            cross = cross * each.after_add.factor(added)[:, None]
        taken.append(_Step(each, source, given, returned, added, moments, opens=not taken))
    cosine = cross.diagonal() / (entered.diagonal() * moments.diagonal()).clamp_min(1e-300).sqrt()
    return float(cosine.mean()), taken


def _backward(walked: list[_Step], steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return K at every place of q and after every add, from a gradient at the end that is alike for all tokens."""
    gradient = torch.eye(steps, dtype=torch.float64)
    found, at_adds, upstream = [gradient], list[torch.Tensor](), gradient
    direct = cross = None  # at an add that what entered the layer goes to as well, and between there and here
    for index in reversed(range(len(walked))):
        step, each = walked[index], walked[index].of
        if each.after_add is not None:
            if cross is not None:
                cross = cross * each.after_add.factor(step.added)[:, None]
            gradient = each.after_add.backward(gradient, step.added)
        at_adds.append(gradient)
        last = index + 1 == len(walked) or walked[index + 1].entered is not step.entered
        if last:  # sublayers side by side all get what comes back to the last of them
            upstream = gradient
        if each.adds_block_input:
            direct = cross = gradient
        branch = upstream * each.branch_gain
        if each.after_branch is not None:
            branch = each.after_branch.backward(branch, step.returned)
        branch = each.branch.backward(step.given, branch) * each.input_gain
        if each.before is not None:
            branch = each.before.backward(branch, step.entered)
        gradient = gradient * each.skip_gain + branch
        if direct is not None and cross is not None:
            cross = cross * math.sqrt(each.skip_gain)
            if step.opens:
                gradient, direct, cross = gradient + cross + cross.T + direct, None, None
        found.append(gradient)
    return found[::-1], at_adds[::-1]
