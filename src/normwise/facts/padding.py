"""Whether what a model makes of a sample depends on the padding behind it: the same samples with and without."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normwise.errors import NotKnown, TraceError
from normwise.facts import mixing
from normwise.facts.changed_inputs import is_mask
from normwise.facts.differences import (
    ABOVE_FLOOR,
    AGREE,
    DIFFER,
    LARGEST,
    changes,
    held,
    largest_change,
    paired_with_output,
    relative_change,
)
from normwise.facts.norms import NormCall
from normwise.facts.runs import Run
from normwise.facts.sites import Site
from normwise.graph import Instead, aligned
from normwise.graph.capture import tensors_in
from normwise.rendering import both
from normwise.targets import inputs

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Padded", "Padding", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """What padding did in one mode."""

    training: bool  # norms with running statistics use those of the batch
    change: float  # of the outputs on the part that the run without padding has
    sites: tuple[Site, ...]  # norms that moved a position although its own input had not moved, and their like
    norm_change: float  # the first of those: of its output on such positions
    floor: float  # and of its input there
    change_held: Callable[[], float]  # with the norms held where their input is still; costs a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """The same samples with padding behind them."""

    share: float  # of the padded input's positions
    modes: tuple[Padded, ...]  # those in which a norm is to blame


_NEEDS = both(
    "needs the same samples with padding behind them: give padded_inputs=...",
    "需要在同样的样本后加上补齐：给出 padded_inputs=...",
)
_OTHER_ROWS = both(
    "padded_inputs are not the samples of inputs, in the same rows, with padding behind them",
    "padded_inputs 不是 inputs 的同一批样本（同样的行）加上末尾补齐",
)
_OTHER_KIND = both(
    "padded_inputs are tensors of another kind or device than inputs",
    "padded_inputs 与 inputs 的张量种类或设备不同",
)
_NO_MORE = both("padded_inputs are not longer than inputs", "padded_inputs 并不比 inputs 长")
_LENGTHS = both("lengths are not one whole number for each row", "lengths 不是每行一个整数")


def read(facts: Facts) -> Padding:
    """Run the padded inputs, in eval mode and, where norms keep running statistics, with those of the batch.

    Raises:
        NotKnown: nothing padded was given, or it does not hold the same samples.
    """
    target = facts.target
    if target.padded_inputs is None:
        raise NotKnown(_NEEDS)
    probe = _Probe(facts.exact, _as_call(facts, target.padded_inputs))
    modes = [probe.compared(training=False)]
    if any(c.running_var is not None for c in facts.exact.norm_calls.norms):
        modes.append(probe.compared(training=True))
    return Padding(share=probe.share, modes=tuple(m for m in modes if m is not None))


def _as_call(facts: Facts, given: Any) -> inputs.Call:
    """Return padded inputs as one call, in the dtype of the facts' copy."""
    call: inputs.Call = ((), dict(given)) if isinstance(given, Mapping) else (tuple(_sequence(given)), {})
    if facts.exact is facts:
        return call
    return inputs.map_tensors(call, lambda t: t.float() if t.is_floating_point() else t)


def _sequence(given: Any) -> Iterable[Any]:
    return given if isinstance(given, (tuple, list)) else (given,)


class _Probe:
    """The two runs of each mode."""

    def __init__(self, facts: Facts, padded: inputs.Call) -> None:
        self.facts, self.target = facts, facts.target
        self.rows = inputs.size_of(self.target, "batch")
        self.steps = 0  # of the inputs that grow
        self.call = self._same_rows(padded)
        self.share = self._check()

    def _same_rows(self, padded: inputs.Call) -> inputs.Call:
        """Leave out rows behind those of the example inputs: partners are another question."""
        longer = dataclasses.replace(self.target, args=padded[0], kwargs=padded[1])
        more = inputs.size_of(longer, "batch")
        if not self.rows or not more:
            raise NotKnown(_OTHER_ROWS)
        if more == self.rows:
            return padded

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            axis = inputs.axis_of(longer, "batch", tensor)
            return tensor if axis is None else tensor.narrow(axis, 0, self.rows)

        if more < self.rows:
            raise NotKnown(_OTHER_ROWS)
        return inputs.map_tensors(padded[0], cut), inputs.map_tensors(padded[1], cut)

    def _check(self) -> float:
        """Compare the inputs themselves, and return the share of padding."""
        given = list(tensors_in((self.target.args, dict(self.target.kwargs))))
        padded = list(tensors_in(self.call))
        if len(given) != len(padded):
            raise NotKnown(_OTHER_ROWS)
        share = 0.0
        for a, b in zip(given, padded, strict=True):
            if a.layout is not b.layout or a.device != b.device or a.is_complex() != b.is_complex():
                raise NotKnown(_OTHER_KIND)
            part = _prefix(a, b)
            if part is None:
                raise NotKnown(_OTHER_ROWS)
            if part[1].numel() < b.numel():
                share = max(share, 1 - part[1].numel() / b.numel())
                self.steps = next(n for n, m in zip(a.shape, b.shape, strict=True) if n != m)
                if not is_mask(a) and not self._same_samples(*part):
                    raise NotKnown(_OTHER_ROWS)
        if not share:
            raise NotKnown(_NO_MORE)
        return share

    def _same_samples(self, given: torch.Tensor, padded: torch.Tensor) -> bool:
        """Whether the valid part of every row is the same in both."""
        axis = inputs.axis_of(self.target, "batch", given)
        lengths = self._lengths()
        if axis != 0 or lengths is None:
            return largest_change(given, padded) <= AGREE
        time = next((a for a in range(1, given.ndim) if given.shape[a] >= max(lengths, default=0)), None)
        for row, length in enumerate(lengths):
            a, b = given[row], padded[row]
            if time is not None:
                a, b = (t.narrow(time - 1, 0, min(length, t.shape[time - 1])) for t in (a, b))
            if largest_change(a, b) > AGREE:
                return False
        return True

    def _lengths(self) -> list[int] | None:
        given = self.target.lengths
        if given is None:
            return None
        try:
            lengths = [_whole(n) for n in given]
        except Exception as error:  # of whatever the user gave in their place
            raise NotKnown(_LENGTHS) from error
        if len(lengths) < self.rows or min(lengths, default=0) < 0:
            raise NotKnown(_LENGTHS)
        if max(lengths) > max(n for t in tensors_in(self.call) for n in t.shape):
            raise NotKnown(both("lengths are longer than padded_inputs", "lengths 比 padded_inputs 更长"))
        longest = max(a.shape[-1] if a.ndim == 2 else max(a.shape[1:], default=0) for a in self._tensors())
        return [min(n, longest) for n in lengths[: self.rows]]

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (t for t in tensors_in((self.target.args, dict(self.target.kwargs))) if t.ndim > 1)

    def compared(self, *, training: bool) -> Padded | None:
        """Return what padding does in a mode; None where no norm is to blame."""
        runs, graph = self.facts.runs, self.facts.graph
        calls = [
            c
            for c in self.facts.norm_calls.norms
            if (training and c.running_var is not None) or mixing.may_mix(c, graph, self.rows, (self.steps,))
        ]
        if not calls:
            return None
        first = runs.training if training else runs.base
        try:
            second = runs.variant(*self.call, training=training)
        except TraceError as error:
            why = str(error).partition(". ")[0]
            raise NotKnown(
                both(f"the model does not run on padded_inputs: {why}", f"模型无法在 padded_inputs 上运行：{why}")
            ) from error
        pairs = aligned(first.graph, second.graph)
        found = [
            (c, *moved) for c in calls if (moved := self._moved(self._places(c, first, second, pairs))) is not None
        ]
        change = self._output_change(first, second, pairs)
        if not found or change <= AGREE:
            return None
        alike = mixing.like_calls([c for c, *_ in found], calls, graph)
        instead, wanted = self._holding([self._places(c, first, second, pairs) for c in alike])
        wanted |= set(second.graph.outputs)

        @functools.cache
        def change_held() -> float:
            run = runs.variant(*self.call, training=training, wanted=wanted, instead=instead)
            return self._output_change(first, run, pairs)

        if not mixing.moved(change, change_held):
            return None
        return Padded(
            training=training,
            change=change,
            sites=mixing.sites_of_calls(self.facts.sites, alike),
            norm_change=found[0][1],
            floor=found[0][2],
            change_held=change_held,
        )

    def _places(
        self, call: NormCall, first: Run, second: Run, pairs: Mapping[int, int]
    ) -> tuple[_Place, _Place] | None:
        """Return input and output of a norm in both runs; None where they cannot be compared."""
        value = paired_with_output(call, self.facts.graph)
        if value is None:
            return None
        found = []
        for each in (call.input, value):
            here = each if first.pairs is None else first.pairs.get(each, -1)
            a, b = first.tensors.get(here), second.tensors.get(pairs.get(here, -1))
            place = None if a is None or b is None else _place(a, b, self.rows, pairs[here])
            if place is None:
                return None
            found.append(place)
        return found[0], found[1]

    def _moved(self, places: tuple[_Place, _Place] | None) -> tuple[float, float] | None:
        """Return how far a norm moves positions whose own input is still, and how still; None where it does not."""
        if places is None or places[0].axis != places[1].axis:
            return None
        x, y = places
        apart, moved = (changes(p.first, p.align(p.second)).movedim(p.axis, 0).flatten(1).amax(1) for p in places)
        still = apart <= AGREE * float(x.first.double().std(correction=0))
        size = float(y.first.double().square().mean().sqrt())
        if not still.any() or not size:
            return None
        floor = float(apart[still].max() / x.first.double().square().mean().sqrt())
        change = min(float(moved[still].max()) / size, LARGEST)
        return (change, floor) if change >= max(DIFFER, ABOVE_FLOOR * floor) else None

    def _output_change(self, first: Run, second: Run, pairs: Mapping[int, int]) -> float:
        moved = [0.0]
        for value in first.graph.outputs:
            a, b = first.tensors.get(value), second.tensors.get(pairs.get(value, -1))
            part = _prefix(a, b) if a is not None and b is not None else None
            if part is not None:
                moved.append(relative_change(*part))
        return max(moved)

    def _holding(self, found: Iterable[tuple[_Place, _Place] | None]) -> tuple[dict[int, Instead], set[int]]:
        """Return what holds norms to the run without padding, and the values that this reads."""
        instead: dict[int, Instead] = {}
        wanted: set[int] = set()
        for x, y in (places for places in found if places is not None):
            instead[y.id] = held(x.first, y.first, x.axis, (x.id, y.id), x.align)
            wanted.add(x.id)
        return instead, wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A value in both runs, steps as an axis of their own."""

    first: torch.Tensor
    second: torch.Tensor
    axis: int  # that grew
    rows: int  # 0, or the samples to split off an axis that merges them with the steps
    id: int  # in the padded run

    def align(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of the padded run's value that stands for the other's, a view."""
        return _narrowed(self.first, tensor.unflatten(0, (self.rows, -1)) if self.rows else tensor)


def _whole(length: Any) -> int:
    """Return a length as an integer.

    Raises:
        ValueError: it is none.
    """
    if int(length) != length:
        raise ValueError
    return int(length)


def _place(a: torch.Tensor, b: torch.Tensor, rows: int, value: int) -> _Place | None:
    if a.ndim != b.ndim or not a.numel():
        return None
    merged = rows > 1 and a.shape[0] != b.shape[0] and a.shape[0] % rows == 0 and b.shape[0] % rows == 0
    split = b
    if merged:
        a, split = (t.unflatten(0, (rows, -1)) for t in (a, b))
    grown = [axis for axis in range(a.ndim) if a.shape[axis] != split.shape[axis]]
    if len(grown) != 1 or _prefix(a, split) is None:
        return None
    return _Place(first=a, second=b, axis=grown[0], rows=rows if merged else 0, id=value)


def _prefix(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a tensor and the beginning of another that has its shape; None where it is smaller somewhere."""
    if a.ndim != b.ndim or any(n > m for n, m in zip(a.shape, b.shape, strict=True)):
        return None
    return a, _narrowed(a, b)


def _narrowed(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the beginning of a tensor along every axis, a view."""
    for axis, size in enumerate(like.shape):
        tensor = tensor.narrow(axis, 0, min(size, tensor.shape[axis]))
    return tensor
