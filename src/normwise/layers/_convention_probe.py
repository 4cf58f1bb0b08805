"""A private copy of a foreign norm, called on inputs and with operands of our choice."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import nn

from normwise.errors import NoNorm, NotKnown

__all__ = ["Probe", "Values", "close", "quiet", "random", "relative", "single_changes"]

Values = dict[str, torch.Tensor]


# float64 inputs are often normalized in float32, by sums of some thousand terms
_CLOSE = 1e-5
_SEED = 20261129
_SIZE = 16  # of the normalized axis, where no parameter tells it
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def random(shape: Sequence[int], seed: int, low: float | None = None, high: float = 1.5) -> torch.Tensor:
    """Return float64 numbers, normal or uniform in [low, high], that leave the global generator alone."""
    generator = torch.Generator().manual_seed(_SEED + seed)
    if low is None:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return torch.rand(tuple(shape), generator=generator, dtype=torch.float64) * (high - low) + low


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference, as a fraction of the largest number of ``b``; NaN where either holds one."""
    scale = b.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((a.double() - b.double()).abs().max() / scale)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = _CLOSE) -> bool:
    return relative(a, b) <= tolerance


def single_changes(before: torch.Tensor, after: torch.Tensor) -> list[torch.Tensor]:
    """Return for each axis the positions at which anything changed."""
    changed = (after - before).abs() > 1e-7 * before.abs().max()
    return [index.unique() for index in changed.nonzero(as_tuple=True)]


@contextmanager
def quiet() -> Iterator[None]:
    """Leave generators, autocast and warnings as found, whatever the user's code does."""
    with (
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
        torch.autocast("cpu", enabled=False),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _private_copy(module: nn.Module) -> nn.Module:
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise NotKnown("its parameters are on the meta device and hold no numbers; materialize it with to_empty()")
    try:
        copied = copy.deepcopy(module).to("cpu")
    except Exception as error:  # the user's code may refuse to be copied in any way
        raise NotKnown(
            f"it cannot be copied, and the given module must not be touched: {_first_line(error)}"
        ) from error
    for each in copied.modules():
        for name in _HOOKS:
            getattr(each, name).clear()
    return copied


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


class Probe:
    """Calls copies of a module, one for each dtype of parameters.

    Args:
        module: the foreign norm; it is copied and never called itself.
        size: sizes of the trailing axes (or the channels) it takes, where no parameter tells them.
        example: an input, or an input and a gate, whose shape is used.
    """

    def __init__(
        self,
        module: nn.Module,
        size: int | Sequence[int] | None,
        example: torch.Tensor | tuple[torch.Tensor, ...] | None,
    ) -> None:
        self._copies = {torch.float32: _private_copy(module).to(torch.float32)}
        self.names = [name for name, _ in self._copies[torch.float32].named_parameters()]
        self.gated = isinstance(example, tuple) and len(example) > 1
        self.dtype = torch.float64
        self.shape = self._accepted(list(self._layouts(size, example)))

    def train(self, mode: bool) -> None:
        for module in self._copies.values():
            module.train(mode)

    def is_training(self) -> bool:
        return self._copies[torch.float32].training

    def _copy(self, dtype: torch.dtype) -> nn.Module:
        if dtype not in self._copies:
            self._copies[dtype] = copy.deepcopy(self._copies[torch.float32]).to(dtype)
        return self._copies[dtype]

    def buffers(self) -> Values:
        """Return what the copy for ordinary calls holds in floating buffers."""
        named = self._copy(self.dtype).named_buffers()
        return {name: buffer.double() for name, buffer in named if buffer.is_floating_point()}

    def reset_counts(self) -> None:
        """Set integer buffers to 0: no batch has been counted."""
        for buffer in self._copy(self.dtype).buffers():
            if not buffer.is_floating_point():
                buffer.zero_()

    def values(self, seed: int = 0, *, buffers: bool = False) -> Values:
        """Return random numbers for every parameter, and where asked for every floating buffer."""
        held: Values = dict(self._copies[torch.float32].named_parameters())
        held = {**held, **self.buffers()} if buffers else held
        return {name: random(tensor.shape, seed + i, 0.5) for i, (name, tensor) in enumerate(held.items(), 1)}

    def input(self, seed: int, *, rows: int = 1) -> torch.Tensor:
        """Return a random input, with ``rows`` times the rows of the smallest one."""
        return random((self.shape[0] * rows, *self.shape[1:]), seed)

    def run(
        self,
        x: torch.Tensor,
        values: Values,
        dtype: torch.dtype | None = None,
        parameters: torch.dtype | None = None,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output for ``x`` in ``dtype``, with operands ``values`` in the dtype ``parameters``."""
        dtype = dtype or self.dtype
        module = self._copy(parameters or dtype)
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, value in values.items():
            held[name].data.copy_(value)
        inputs = [x.to(dtype)]
        if self.gated:
            inputs.append((torch.full_like(x, 40.0) if gate is None else gate).to(dtype))
        return module(*inputs)

    # -- which inputs it takes ------------------------------------------------------------------

    def _layouts(
        self, size: int | Sequence[int] | None, example: torch.Tensor | tuple[torch.Tensor, ...] | None
    ) -> Iterable[tuple[int, ...]]:
        if example is not None:
            return [tuple((example if isinstance(example, torch.Tensor) else example[0]).shape)]
        module = self._copies[torch.float32]
        held = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()]
        shape = (size,) if isinstance(size, int) else tuple(size or ())
        if not shape and held:
            shape = tuple(each for each in max(held, key=torch.Tensor.numel).shape if each != 1)
        shape = shape or (_SIZE,)
        a, b, c, d = [each for each in (3, 5, 7, 2, 11, 13) if each not in shape][:4]
        trailing = [(d, a, *shape)]
        if len(shape) > 1:
            return [*trailing, (a, *shape), (d, a, math.prod(shape))]
        return [*trailing, (a, *shape, b), (a, *shape), (d, *shape, a, b), (d, a, b, *shape), (d, *shape, a, d, c)]

    def _accepted(self, layouts: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the first layout that gives an output of its own shape; sets whether it takes a gate."""
        refusals: list[str] = []
        ways = product([True] if self.gated else [False, True], (torch.float64, torch.float32), layouts)
        for gated, dtype, shape in ways:
            self.gated, self.dtype = gated, dtype
            said = self._refusal(shape)
            if said is None:
                return shape
            refusals.append(f"{list(shape)}: {said}")
        raise NoNorm(
            f"no input of shape {' or '.join(str(list(shape)) for shape in layouts)} gives an output of the same "
            f"shape ({refusals[0]}); pass size= or example="
        )

    def _refusal(self, shape: tuple[int, ...]) -> str | None:
        try:
            y = self.run(random(shape, 0), self.values())
        except Exception as error:  # the user's code may refuse this shape in any way
            return _first_line(error)
        if not isinstance(y, torch.Tensor):
            return f"it returns a {type(y).__name__}"
        if y.shape != shape or not y.is_floating_point():
            return f"it returns shape {list(y.shape)}, {y.dtype}"
        return None
