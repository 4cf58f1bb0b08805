"""The layer under test: how it is made, what it is called with, and what it should return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from normwise.spec import Cast, Gate, Modulation, NormSpec, Scope, Weight, reference
from normwise.spec.definition import along, eps_of, stats_dtype

__all__ = ["Case", "Truth", "case_of", "random"]

_SEED = 20261129
_SIZE = 48  # of the normalized axis or of the channels, where the factory takes it
_ROWS = 6
_SPATIAL = (5, 3, 2)
_LAYOUTS = {Scope.BATCH: 1, Scope.GROUP: 1, Scope.INSTANCE: 2}  # axes of the input beside those of the statistic


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return normal numbers that leave the global generator alone."""
    generator = torch.Generator().manual_seed(_SEED + seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Output and gradients in float64, and the size of what rounding acts on."""

    y: torch.Tensor
    grads: dict[str, torch.Tensor]
    scale: torch.Tensor | float  # |output before the shift| + |shift| + one standard deviation of the output


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer, its spec and the shape of its input."""

    factory: Callable[..., Any]
    spec: NormSpec
    shape: tuple[int, ...]
    sized: bool
    residual: bool
    masked: bool

    def layer(self, dtype: torch.dtype = torch.float32, size: int | None = None) -> Any:
        """Return a fresh layer with random gain and shift, the same ones on every call."""
        layer = self.factory(size or _SIZE) if self.sized else self.factory()
        if isinstance(layer, nn.Module):
            layer = layer.to(dtype)
        for seed, name in enumerate(("weight", "bias")):
            held = getattr(layer, name, None)
            if held is None:
                continue
            around = 1.0 - self.spec.weight_offset if name == "weight" else 0.0
            value = (around + 0.4 * random(tuple(held.shape), seed)).to(dtype)
            if isinstance(held, nn.Parameter):
                held.data.copy_(value)
            else:
                setattr(layer, name, value.requires_grad_())
        return layer

    def parameters(self, layer: Any) -> dict[str, torch.Tensor]:
        """Return gain and shift, those that there are."""
        named = {name: getattr(layer, name, None) for name in ("weight", "bias")}
        return {name: each for name, each in named.items() if each is not None}

    def input(self, dtype: torch.dtype = torch.float32, *, rows: int | None = None, seed: int = 7) -> torch.Tensor:
        """Return normal numbers with a mean of half a standard deviation."""
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        return (random(shape, seed) + 0.5).to(dtype)

    def call(self, layer: Any, x: torch.Tensor, **more: Any) -> torch.Tensor:
        """Return the normalized tensor."""
        return layer(x, torch.zeros_like(x), **more)[0] if self.residual else layer(x, **more)

    def run(self, layer: Any, x: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``y`` and the gradients of ``x``, ``weight`` and ``bias`` for the gradient ``upstream`` of y."""
        x = x.detach().requires_grad_()
        parameters = self.parameters(layer)
        y = self.call(layer, x)
        grads = torch.autograd.grad(y, [x, *parameters.values()], upstream.to(y.dtype, copy=True))
        return {"y": y.detach(), **dict(zip(["x", *parameters], grads, strict=True))}

    @property
    def elements(self) -> int:
        """Return how many elements are behind one statistic."""
        return math.prod(self.shape[axis] for axis in self.spec.axes) // (self.spec.groups or 1)

    def truth(
        self, x: torch.Tensor, parameters: dict[str, torch.Tensor], upstream: torch.Tensor | None = None
    ) -> Truth:
        """Return the reference in float64, for numbers as the layer sees them."""
        wide = x.detach().double().requires_grad_()
        held = {name: each.detach().double().requires_grad_() for name, each in parameters.items()}
        y = self._reference(x, wide, held)
        grads = {}
        if upstream is not None:
            found = torch.autograd.grad(y, [wide, *held.values()], upstream.double())
            grads = dict(zip(["x", *held], found, strict=True))
        return Truth(y=y.detach(), grads=grads, scale=self._scale(y.detach(), held))

    def second(
        self, x: torch.Tensor, parameters: dict[str, torch.Tensor], upstream: torch.Tensor, toward: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the derivatives of <toward, gradient of x> for x and the parameters."""
        wide = x.detach().double().requires_grad_()
        held = {name: each.detach().double().requires_grad_() for name, each in parameters.items()}
        (first,) = torch.autograd.grad(self._reference(x, wide, held), wide, upstream, create_graph=True)
        inputs = [wide, *held.values()]
        found = torch.autograd.grad(first, inputs, toward, allow_unused=True)
        return [torch.zeros_like(own) if each is None else each for own, each in zip(inputs, found, strict=True)]

    def _reference(self, x: torch.Tensor, wide: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
        eps = eps_of(self.spec, stats_dtype(self.spec, x))
        spec = replace(self.spec, eps=eps, cast=Cast.NONE, out_dtype=None)
        return reference(spec, wide, held.get("weight"), held.get("bias"))

    def _scale(self, y: torch.Tensor, held: dict[str, torch.Tensor]) -> torch.Tensor:
        gain = (held["weight"].detach() + self.spec.weight_offset).abs().max() if "weight" in held else 1.0
        shift = along(self.spec, held["bias"].detach(), y.ndim) if "bias" in held else torch.zeros(())
        return (y - shift).abs() + shift.abs() + gain * abs(self.spec.factor)


def case_of(layer_factory: Callable[..., Any], spec: NormSpec, shape: tuple[int, ...] | None, residual: bool) -> Case:
    """Return the case of a factory.

    Raises:
        ValueError: a spec with a gate or a modulation.
    """
    if spec.gate is not Gate.NONE or spec.modulation is not Modulation.NONE:
        raise ValueError(
            f"conformance() checks norms of one input, given a spec with gate='{spec.gate}' and "
            f"modulation='{spec.modulation}'; wrap the layer so that the other inputs are constants"
        )
    sized = _takes_a_size(layer_factory)
    layer = layer_factory(_SIZE) if sized else layer_factory()
    forward = layer.forward if isinstance(layer, nn.Module) else layer
    return Case(
        factory=layer_factory,
        spec=spec,
        shape=shape or _shape(spec, layer),
        sized=sized,
        residual=residual,
        masked="mask" in inspect.signature(forward).parameters,
    )


def _takes_a_size(factory: Callable[..., Any]) -> bool:
    needed = [each for each in inspect.signature(factory).parameters.values() if each.default is each.empty]
    return any(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in needed)


def _shape(spec: NormSpec, layer: Any) -> tuple[int, ...]:
    weight = getattr(layer, "weight", None)
    held = () if weight is None or spec.weight is Weight.SCALAR else tuple(weight.shape)
    if spec.scope in _LAYOUTS:
        ndim = len(spec.axes) + _LAYOUTS[spec.scope]
        rest = [axis for axis in range(-ndim, 0) if axis not in spec.axes]
        channel = max(rest) if spec.scope is not Scope.GROUP else 1 - ndim
        sizes = dict(zip(range(-ndim, 0), (_ROWS, *_SPATIAL, 2)[:ndim], strict=True))
        return tuple({**sizes, channel: held[0] if held else _SIZE}.values())
    depth = -min(spec.axes)
    if len(held) == len(spec.axes) and depth > len(held):  # channels of an image
        return (_ROWS, *held, *_SPATIAL[: depth - len(held)])
    return (_ROWS, *(held if len(held) >= depth else (_SIZE,) * depth))
