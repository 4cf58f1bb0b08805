"""Random calls of the compiled kernels: shapes, layouts, dtypes, specs and operands, one function a family.

Numbers lie in memory with gaps of NaN, in any order of axes, and start at any element. A large call is one whose
output is written past the cache: together with what is read it fills a last cache of 32 MiB (``csrc/memory.cpp``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from normwise.functional.batch import BATCH, batch_spec, instance_spec
from normwise.functional.group import group_spec
from normwise.kernels import Moments
from normwise.spec import PROMOTED, Cast, Form, Gate, NormSpec, Statistic, Weight

__all__ = ["FAMILIES", "LARGE", "PAST_CACHE", "Call", "Draw"]

RMS = NormSpec(cast=Cast.AFTER_WEIGHT)
LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True)
LLAMA = replace(RMS, cast=Cast.BEFORE_WEIGHT, out_dtype=PROMOTED)
T5 = replace(RMS, cast=Cast.TO_WEIGHT, out_dtype=PROMOTED)
SCALE = NormSpec(
    statistic=Statistic.L2, eps=1e-5, eps_inside=False, eps_clamp=True, weight=Weight.SCALAR, cast=Cast.AFTER_WEIGHT
)
ROWS = {
    "rms": RMS,
    "llama": LLAMA,
    "t5": T5,
    "gemma": replace(RMS, weight_offset=1.0),
    "outside": replace(RMS, eps_inside=False),
    "layer": LAYER,
    "torch-layer": replace(LAYER, form=Form.TORCH),
    "scale": SCALE,
}
ADDED = {name: spec for name, spec in ROWS.items() if name not in ("scale", "t5")}
CHANNELS = {name: spec for name, spec in ROWS.items() if spec.weight is not Weight.SCALAR}
ROUNDED = {"once": RMS, "twice": replace(RMS, cast=Cast.BEFORE_WEIGHT), "llama": LLAMA, "t5": T5}
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF, torch.float64)
# Bytes of a large output: with as many that are read more than 32 MiB, the last cache of most servers.
PAST_CACHE = 17 << 20


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: what is computed of which tensors, and what was drawn, for the message.

    Args:
        family: which function drew it.
        name: which of the norms of the family.
        spec: what is computed.
        inputs: what gradients are taken of: x, and weight, bias, gate, residual where there are any.
        dy: the gradient of the output.
        mask: which elements are real.
        given: statistics to use.
        wide: whether a sum with a residual is asked for in float32.
        large: whether the output is written past the cache.
    """

    family: str
    name: str
    spec: NormSpec
    inputs: dict[str, torch.Tensor]
    dy: torch.Tensor
    mask: torch.Tensor | None = None
    given: Moments | None = None
    wide: bool = False
    large: bool = False

    @property
    def x(self) -> torch.Tensor:
        """Return the input."""
        return self.inputs["x"]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return everything that the kernel reads."""
        known = () if self.given is None else (("mean", self.given.mean), ("statistic", self.given.statistic))
        others = (("dy", self.dy), ("mask", self.mask), *known)
        return self.inputs | {name: each for name, each in others if each is not None}

    def __str__(self) -> str:
        told = ", ".join(
            f"{name}{list(each.shape)} {str(each.dtype).removeprefix('torch.')} strides {each.stride()} "
            f"offset {each.storage_offset()}"
            for name, each in self.tensors().items()
        )
        return f"{self.family} {self.name}{' wide' * self.wide} axes {self.spec.axes} groups {self.spec.groups}: {told}"


class Draw(random.Random):
    """Random numbers, sizes and places in memory."""

    def numbers(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        """Return normally distributed numbers."""
        generator = torch.Generator().manual_seed(self.randrange(2**31))
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift

    def size(self, most: int) -> int:
        """Return a size from 1 to ``most``, small ones and powers of two more often."""
        bounded = [self.randint(1, min(most, bound)) for bound in (40, 1500, most)]
        return self.choice([*bounded, 2 ** self.randint(0, most.bit_length() - 1)])

    def maybe(self, share: float) -> bool:
        """Return True in this share of the cases."""
        return self.random() < share

    def dtypes(self, large: bool = False) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of an input and of its gain; large outputs in half precision hold twice as many numbers."""
        dtype = self.choice([torch.float32, torch.float32, torch.bfloat16] if large else DTYPES)
        return dtype, self.choice([dtype, torch.float32]) if dtype in HALF else dtype

    def placed(self, x: torch.Tensor, dtype: torch.dtype, order: tuple[int, ...], gaps: float = 0.2) -> torch.Tensor:
        """Return ``x`` in memory where the axes come in this order, that of the largest stride first."""
        strides, room = [0] * x.ndim, 2 if self.maybe(gaps / 4) else 1
        widened = self.choice(order) if order and self.maybe(gaps) else None
        for axis in reversed(order):
            strides[axis], room = room, room * max(x.shape[axis], 1)
            if axis == widened:
                room += self.choice([1, 3, 17])
        start = self.choice([0, 1, 3, 5])
        memory = torch.full((start + room,), math.nan, dtype=torch.float64).to(dtype)
        return memory.as_strided(x.shape, strides, start).copy_(x)

    def upstream(self, dy: torch.Tensor, dtype: torch.dtype, order: tuple[int, ...], gaps: float = 0.2) -> torch.Tensor:
        """Return ``dy`` in memory as above, or now and then one number for all elements, as below a sum."""
        if self.maybe(0.05):
            return self.numbers(1).to(dtype).expand(dy.shape)
        return self.placed(dy, dtype, order, gaps)

    def order(self, ndim: int, channel: int = 1) -> tuple[int, ...]:
        """Return an order of axes: contiguous, channels last, or any."""
        plain = tuple(range(ndim))
        last = (*(axis for axis in plain if axis != channel), channel)
        return self.choice([plain, plain, last, last, tuple(self.sample(plain, ndim))])

    def vector(self, size: int, dtype: torch.dtype, shift: float = 0.0) -> torch.Tensor:
        """Return a gain or a shift."""
        return self.placed(self.numbers(size, shift=shift), dtype, (0,))

    def matrix(self, elements: int, large: bool = False) -> tuple[int, int]:
        """Return how many rows of how many numbers make at most about ``elements``, or just more: whole cache lines."""
        width = self.choice([70_016, 4096, 768]) if large else self.size(70_000)
        return (-(-elements // width) if large else self.randint(0, min(300, max(1, elements // width)))), width

    def image(self, elements: int, least_ndim: int = 2, large: bool = False) -> torch.Size:
        """Return a shape [N, C, *] of at most about ``elements`` numbers, sometimes none; just more where ``large``."""
        extra = self.randint(max(0, least_ndim - 2), 3)
        if large:
            plane = self.choice([49, 56 * 56, 55 * 57, 70_000]) if extra else 1
            channels = self.choice([16, 64, 100, 2000]) if plane < 10_000 else self.choice([1, 16])
        else:
            plane = self.size(70_000) if extra else 1
            channels = min(self.size(2000), max(1, elements // plane))
        each = plane * channels
        samples = -(-elements // each) if large else min(self.size(300), max(1, elements // each))
        spatial = [plane] if extra else []
        for _ in range(extra - 1):
            sides = range(1, math.isqrt(spatial[-1]) + 1)  # divisors where no element must be lost
            side = self.choice([each for each in sides if not large or spatial[-1] % each == 0])
            spatial[-1:] = side, spatial[-1] // side
        shape = [samples, channels, *spatial]
        if not large and self.maybe(0.04):
            shape[self.choice([axis for axis in range(len(shape)) if axis != 1])] = 0
        return torch.Size(shape)


def _out_dtype(spec: NormSpec, x: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
    if spec.out_dtype == PROMOTED and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


def _parameters(
    draw: Draw, spec: NormSpec, size: int, held: torch.dtype, alone: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return gain and shift, either or none; ``alone`` is the dtype of a shift without gain, if there may be one."""
    if spec.weight is Weight.SCALAR:
        return {"weight": draw.numbers().to(held)}
    weight, bias = draw.maybe(0.8) or spec.cast is Cast.TO_WEIGHT, spec.bias and draw.maybe(0.8)
    found = {"weight": draw.vector(size, held)} if weight else {}
    if bias and (weight or alone is not None):
        found["bias"] = draw.vector(size, held if weight or alone is None else alone)
    return found


def rows(draw: Draw, elements: int, large: bool = False, added: bool | None = None) -> Call:
    """Draw a norm of rows, perhaps of a sum with a residual."""
    dtype, held = draw.dtypes(large)
    shape = draw.matrix(PAST_CACHE // dtype.itemsize if large else elements, large)
    name = draw.choice(list(ADDED if added else ROWS))
    spec = ROWS[name]
    inputs = {"x": draw.placed(draw.numbers(*shape, scale=2, shift=0.5), dtype, (0, 1), 0.6)}
    inputs |= _parameters(draw, spec, shape[1], held)
    out, wide = _out_dtype(spec, inputs["x"], inputs.get("weight")), False
    if spec.weight is not Weight.SCALAR and (draw.maybe(0.3) if added is None else added):
        other = torch.float32 if dtype in HALF and draw.maybe(0.5) else dtype
        inputs["residual"], out = draw.placed(draw.numbers(*shape, scale=2), other, (0, 1), 0.6), dtype
        wide = other in HALF and draw.maybe(0.5)
    dy = draw.upstream(draw.numbers(*shape), out, (0, 1), 0.6)
    if spec.weight is not Weight.SCALAR and draw.maybe(0.1):  # a row of two axes
        side = draw.choice([each for each in range(1, 65) if shape[1] % each == 0])
        spec = replace(spec, axes=(-2, -1))
        *split, dy = (each.unflatten(-1, (side, -1)) for each in (*inputs.values(), dy))
        inputs = dict(zip(inputs, split, strict=True))
    return Call(family="rows", name=name, spec=spec, inputs=inputs, dy=dy, wide=wide, large=large)


def gated(draw: Draw, elements: int) -> Call:
    """Draw a gated norm of rows; the gate is wide enough that both ends of the activation are met."""
    (count, width), (dtype, held) = draw.matrix(elements), draw.dtypes()
    name, groups = draw.choice(list(ROUNDED)), draw.choice([None, None, 1, 2, 4, 8, draw.randint(1, 60)])
    if groups is not None and draw.maybe(0.95):  # else the call may be one to refuse
        width = max(width // groups, 1) * groups
    spec = replace(
        ROUNDED[name],
        gate=draw.choice([Gate.BEFORE, Gate.AFTER]),
        gate_activation=draw.choice(["silu", "sigmoid"]),
        groups=groups,
        weight_offset=draw.choice([0.0, 0.0, 1.0]),
        weight=Weight.SCALAR if groups is None and draw.maybe(0.1) else Weight.VECTOR,
    )
    inputs = {"x": draw.placed(draw.numbers(count, width, scale=2), dtype, (0, 1), 0.6)}
    inputs |= _parameters(draw, spec, width, held)
    inputs["gate"] = draw.placed(draw.numbers(count, width, scale=6), dtype, (0, 1), 0.6)
    dy = draw.upstream(draw.numbers(count, width), _out_dtype(spec, inputs["x"], inputs.get("weight")), (0, 1), 0.6)
    return Call(family="gated", name=f"{name} {spec.gate} {spec.gate_activation}", spec=spec, inputs=inputs, dy=dy)


def channels(draw: Draw, elements: int) -> Call:
    """Draw a norm over one axis that is not the last."""
    shape, (dtype, held) = draw.image(elements, least_ndim=3), draw.dtypes()
    axis = draw.choice([1, 1, 1, draw.randrange(len(shape) - 1)])
    name = draw.choice(list(CHANNELS))
    spec = replace(CHANNELS[name], axes=(axis - len(shape),))
    order = draw.order(len(shape), axis)
    inputs = {"x": draw.placed(draw.numbers(*shape, scale=2, shift=0.5), dtype, order)}
    inputs |= _parameters(draw, spec, shape[axis], held)
    out = _out_dtype(spec, inputs["x"], inputs.get("weight"))
    dy = draw.upstream(draw.numbers(*shape), out, draw.choice([order, draw.order(len(shape), axis)]))
    return Call(family="channels", name=name, spec=spec, inputs=inputs, dy=dy)


def _mask(draw: Draw, shape: tuple[int, ...], channel: int) -> torch.Tensor:
    """Return which elements are real: any share of them, the same along some axes."""
    sizes = [1 if axis == channel or draw.maybe(0.2) else size for axis, size in enumerate(shape)]
    real = draw.numbers(*sizes) < draw.choice([-9.0, -1.0, 0.5, 1.5, 9.0])
    return draw.placed(real, torch.bool, draw.order(len(shape), channel)) if draw.maybe(0.5) else real


def batch(draw: Draw, elements: int, large: bool = False) -> Call:
    """Draw a norm over a batch, with its own statistics or with given ones, with padding or without."""
    dtype, held = draw.dtypes(large)
    shape = draw.image(PAST_CACHE // dtype.itemsize if large else elements, large=large)
    channel = 1 if large else draw.choice([1, 1, 1, len(shape) - 1, draw.randrange(len(shape))])
    size: int = shape[channel]
    sums = torch.float64 if dtype is torch.float64 else torch.float32
    spec = replace(batch_spec(BATCH, len(shape), channel), weight_offset=draw.choice([0.0, 0.0, 1.0]))
    values, upstream, mask, given = draw.numbers(*shape, scale=2, shift=0.5), draw.numbers(*shape), None, None
    if draw.maybe(0.3):
        mask = _mask(draw, shape, channel)
        values, upstream = (torch.where(mask, each, math.nan) for each in (values, upstream))
    if draw.maybe(0.3):
        along = [size if axis == channel else 1 for axis in range(len(shape))]
        mean, variance = draw.vector(size, sums), draw.placed(draw.numbers(size).square() + 0.1, sums, (0,))
        given = Moments(mean.view(along), variance.view(along), 0)
    order = draw.order(len(shape), channel)
    inputs = {"x": draw.placed(values, dtype, order, 0.0 if large else 0.2)}
    inputs |= _parameters(draw, spec, size, held, alone=sums)
    dy = draw.upstream(upstream, dtype, draw.choice([order, draw.order(len(shape), channel)]))
    name = f"channel {channel}"
    return Call(family="batch", name=name, spec=spec, inputs=inputs, dy=dy, mask=mask, given=given, large=large)


def group(draw: Draw, elements: int, large: bool = False) -> Call:
    """Draw a norm of groups of channels, or of single ones."""
    dtype, held = draw.dtypes(large)
    shape = draw.image(PAST_CACHE // dtype.itemsize if large else elements, large=large)
    divisors = [groups for groups in range(1, shape[1] + 1) if shape[1] % groups == 0]
    instance = len(shape) > 2 and draw.maybe(0.4)
    spec = instance_spec(1e-5, len(shape)) if instance else group_spec(draw.choice(divisors), 1e-5, len(shape))
    spec = replace(spec, weight_offset=draw.choice([0.0, 0.0, 1.0]))
    order = draw.order(len(shape))
    inputs = {"x": draw.placed(draw.numbers(*shape, scale=2, shift=0.5), dtype, order, 0.0 if large else 0.2)}
    inputs |= _parameters(draw, spec, shape[1], held, alone=held)
    dy = draw.upstream(draw.numbers(*shape), dtype, draw.choice([order, draw.order(len(shape))]))
    name = "instance" if instance else "group"
    return Call(family="group", name=name, spec=spec, inputs=inputs, dy=dy, large=large)


FAMILIES: dict[str, Callable[[Draw, int], Call]] = {
    "rows": rows,
    "gated": gated,
    "channels": channels,
    "batch": batch,
    "group": group,
}
LARGE: dict[str, Callable[[Draw], Call]] = {
    "rows": lambda draw: rows(draw, 0, large=True, added=False),
    "added rows": lambda draw: rows(draw, 0, large=True, added=True),
    "batch": lambda draw: batch(draw, 0, large=True),
    "group": lambda draw: group(draw, 0, large=True),
}
