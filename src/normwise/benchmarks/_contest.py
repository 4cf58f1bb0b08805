"""A contest: one layer on one input, everything about it measured in the same rounds.

Bytes that must move, for an input of n bytes (weights and one number a row are left out):

=================  ====================================  ===========================================
what               plain norm                            with a residual
=================  ====================================  ===========================================
forward            2n: x read, y written                 4n: x, residual read, y, sum written
backward           3n: dy, x read, dx written            4n: dy, dsum, sum read, one gradient written
forward+backward   5n                                    8n
x.clone()          2n                                    2n, and 5n for ``torch.add`` and a clone
=================  ====================================  ===========================================

The copy allocates its result like the norms do: above some size glibc takes memory from the system and gives it back
at each call, for all of them alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch

from normwise.benchmarks._race import Method, Prepare, Race, Run, quartiles, race, repeated
from normwise.benchmarks._result import OURS, Row
from normwise.benchmarks._saved import saved_bytes

__all__ = [
    "ADD_CLONE",
    "BACKWARD",
    "BOTH",
    "CLONE",
    "FORWARD",
    "Built",
    "Contest",
    "Rival",
    "Setting",
    "settle",
    "times_of_models",
]

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
CLONE, ADD_CLONE = "x.clone()", "torch.add, clone"
_SEED = 20261129


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a contest is about; rows carry it."""

    layer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    threads: int
    layout: str | None = None
    device: str = "cpu"
    residual: bool = False

    def row(self, what: str, rival: str) -> Row:
        """Return a row without figures."""
        return Row(
            layer=self.layer,
            shape=self.shape,
            dtype=str(self.dtype).removeprefix("torch."),
            layout=self.layout,
            threads=self.threads,
            what=what,
            rival=rival,
        )

    def inputs(self, *, count: int | None = None) -> list[torch.Tensor]:
        """Return normal numbers, the same ones for every rival: the input, and the residual if there is one."""
        generator = torch.Generator().manual_seed(_SEED)
        given = 1 + self.residual if count is None else count
        made = (torch.randn(self.shape, generator=generator).to(self.device, self.dtype) for _ in range(given))
        channels_last = self.layout == "channels_last"
        return [x.contiguous(memory_format=torch.channels_last) if channels_last else x for x in made]


@dataclass(frozen=True, slots=True)
class Built:
    """A rival made for one setting: what is called with the inputs, and its parameters."""

    call: Callable[..., Any]
    parameters: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Somebody who computes a layer.

    Args:
        name: as the rows show it.
        build: makes it; raises where it cannot run, and its rows say why.
        trains: whether it has a backward pass.
    """

    name: str
    build: Callable[[], Built]
    trains: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One layer on one input, by several rivals.

    Args:
        setting: what it is about.
        rivals: who computes it, ours first.
        check: raises ``benchmarks.Wrong`` where ours does not compute what its spec says.
        passes: what to measure of each rival.
    """

    setting: Setting
    rivals: Sequence[Rival]
    check: Callable[[], None]
    passes: Sequence[str] = (FORWARD, BACKWARD, BOTH)

    def entries(self) -> int:
        """Return how many measurements a round has."""
        return len(self._asked()) + 1 + self.setting.residual

    def _asked(self) -> list[tuple[str, Rival]]:
        return [(what, rival) for what in self.passes for rival in self.rivals if rival.trains or what == FORWARD]

    def run(self, method: Method, advance: Callable[[], Any] = lambda: None) -> tuple[list[Row], bool]:
        """Measure everything in the same rounds.

        Returns:
            The rows, and whether all rounds were run.
        """
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # each contest compiles anew: no limit on recompilations, no dynamic shapes
        setting = self.setting
        inputs = setting.inputs()
        upstream = setting.inputs(count=2 + setting.residual)[1:]
        entries: list[tuple[str, str, Prepare]] = [(FORWARD, CLONE, lambda: repeated(inputs[0].clone))]
        if setting.residual:
            entries.append((FORWARD, ADD_CLONE, lambda: repeated(lambda: torch.add(*inputs).clone())))
        works = {rival.name: _Work(rival, inputs, upstream) for rival in self.rivals}
        entries += [(what, rival.name, works[rival.name].prepare(what)) for what, rival in self._asked()]
        done = race([each[2] for each in entries], method, settle=settle(setting.device), advance=advance)
        rows = []
        for (what, name, _), seconds, calls, why in zip(entries, done.seconds, done.calls, done.why, strict=True):
            row = replace(setting.row(what, name), why=why, rounds=len(seconds), calls=calls)
            if seconds:
                low, ms, high = (1e3 * each for each in quartiles(seconds))
                gb = self._bytes(what, name) / ms / 1e6
                row = replace(row, ms=ms, low=low, high=high, gb_per_s=gb)
            if what == BOTH and seconds:
                row = replace(row, saved=works[name].saved())
            if seconds or why:
                rows.append(row)
        return _compared(rows), done.finished

    def _bytes(self, what: str, rival: str) -> int:
        size = self.setting.dtype.itemsize * int(torch.Size(self.setting.shape).numel())
        if rival in _LIMITS:
            return _LIMITS[rival] * size
        moves = _WITH_RESIDUAL if self.setting.residual else _PLAIN
        return moves[what] * size


_LIMITS = {CLONE: 2, ADD_CLONE: 5}  # reads and writes of the input's size
_PLAIN = {FORWARD: 2, BACKWARD: 3, BOTH: 5}
_WITH_RESIDUAL = {FORWARD: 4, BACKWARD: 4, BOTH: 8}


class _Work:
    """What a rival does with its inputs; it is built on first use, inside the race that notes failures."""

    def __init__(self, rival: Rival, inputs: list[torch.Tensor], upstream: list[torch.Tensor]) -> None:
        self._rival = rival
        self._plain = inputs
        self._upstream = upstream
        self._built: Built | None = None

    def prepare(self, what: str) -> Prepare:
        """Return what makes ready one measurement of forward, backward, or both."""
        return {FORWARD: self._forward, BACKWARD: self._backward, BOTH: self._both}[what]

    def saved(self) -> float:
        """Return the bytes kept for the backward pass over those of the input."""
        own, inputs = self._own(), self._leaves()
        return saved_bytes(lambda: own.call(*inputs), own.parameters) / self._plain[0].nbytes

    def _own(self) -> Built:
        if self._built is None:
            self._built = self._rival.build()
        return self._built

    def _leaves(self) -> list[torch.Tensor]:
        return [x.detach().requires_grad_() for x in self._plain]

    def _forward(self) -> Run:
        call, inputs = self._own().call, self._plain

        def run(calls: int) -> None:
            with torch.no_grad():  # outside the loop: entering it takes as long as a small norm
                for _ in repeat(None, calls):
                    call(*inputs)

        return run

    def _backward(self) -> Run:
        own, inputs = self._own(), self._leaves()
        outputs = _tuple(own.call(*inputs))
        wanted, upstream = [*inputs, *own.parameters], self._upstream
        return repeated(lambda: torch.autograd.grad(outputs, wanted, upstream, retain_graph=True))

    def _both(self) -> Run:
        own, inputs = self._own(), self._leaves()
        wanted, upstream = [*inputs, *own.parameters], self._upstream
        return repeated(lambda: torch.autograd.grad(_tuple(own.call(*inputs)), wanted, upstream))


def _tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _compared(rows: list[Row]) -> list[Row]:
    """Fill in the multiples of the copy and of our own time."""
    copy = next((row.ms for row in rows if row.rival == CLONE), None)
    ours = {row.what: row.ms for row in rows if row.rival == OURS}
    return [replace(row, copies=_over(row.ms, copy), relative=_over(row.ms, ours.get(row.what))) for row in rows]


def _over(ms: float | None, other: float | None) -> float | None:
    return ms / other if ms and other else None


def times_of_models(setting: Setting, what: str, names: Iterable[str], done: Race) -> list[Row]:
    """Return a row with times for each whole model of a race that ran, or that says why it did not."""
    rows = []
    for name, seconds, calls, why in zip(names, done.seconds, done.calls, done.why, strict=True):
        row = replace(setting.row(what, name), rounds=len(seconds), calls=calls, why=why)
        if seconds:
            low, ms, high = (1e3 * each for each in quartiles(seconds))
            row = replace(row, ms=ms, low=low, high=high)
        if seconds or why:
            rows.append(row)
    ours = next((row.ms for row in rows if row.rival == OURS), None)
    return [replace(row, relative=row.ms / ours if row.ms and ours else None) for row in rows]


def settle(device: str) -> Callable[[], Any]:
    """Return what waits until all that was called on a device has run."""
    return torch.cuda.synchronize if device.startswith("cuda") else lambda: None
