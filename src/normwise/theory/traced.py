"""What any traced model does to signals and gradients at initialisation, from its dataflow and its weights.

No class and no name is consulted: matrices, activation functions, masks and factors are found by dataflow and by
running pieces of the program again. What cannot be read is not guessed at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from normwise import targets
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.chains import Residual
from normwise.facts.records import Place, ProfileRow
from normwise.rendering import both
from normwise.targets import unwrap
from normwise.targets.guesses import sequence_first
from normwise.targets.target import Target
from normwise.theory._branches import AttentionBranch
from normwise.theory._moments import Norm, Prediction, Sublayer, forecast, moments_of
from normwise.theory._reading import Reader
from normwise.theory._sublayers import branch_of

__all__ = ["Described", "beside", "described", "predict_traced"]

# [T, T] numbers for every sublayer, and pairs of sizes where no norm makes them one: 0.3 s a layer at most
_LONGEST = 128
# of what reaches the end, a token has 1/T where the outputs are as many as the tokens; twice that is another kind
_ALIKE = 2.0

_CROOKED = both("the stream does not run straight from one add to the next", "残差流从一个加法到下一个不是直路")


@dataclass(frozen=True, slots=True)
class Described:
    """A stack of a traced model as the theory takes it.

    Args:
        layers: the sublayers of each block.
        moments: [T, T], second moments of what enters, from the run.
        width: H.
        adds: for each residual add, the number of its last sublayer.
    """

    layers: tuple[tuple[Sublayer, ...], ...]
    moments: torch.Tensor
    width: int
    adds: tuple[int, ...]

    def predict(self) -> Prediction:
        """Return what is expected."""
        return forecast(self.layers, self.moments, self.width)


@torch.inference_mode(False)  # slopes are taken by differentiating
def predict_traced(model: nn.Module | Target | str | Facts, inputs: Any = None, *, stack: int = 0) -> Prediction:
    """Return what is expected of a residual stream of any model, from its weights and what enters the stream.

    A prediction is of sublayers, so sublayers side by side (attention + MLP in one add) have an entry each. It holds
    at initialisation only; that the model stands there is not checked.

    Args:
        model: a module, a Target, any TARGET string, or facts that are known already.
        inputs: one call's inputs, as for ``check``; not read with facts.
        stack: number of the stream, as in ``report.placement.stacks``.

    Raises:
        NotKnown: a sublayer is neither attention nor an MLP of a known form, tokens see different keys, there are no
            numbers, ...: the reason.
        TargetError: the model cannot be fed; pass ``inputs``.
        TraceError: its forward raised.

    Examples:
        >>> import torch
        >>> block = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> told = predict_traced(block, torch.randn(2, 5, 16))
        >>> round(told.q[-1], 6), len(told.branch)
        (1.0, 2)
    """
    facts = model if isinstance(model, Facts) else Facts(targets.target(model, inputs))
    return described(facts, stack).predict()


def described(facts: Facts, stack: int = 0) -> Described:
    """Read a stack off a traced model.

    Raises:
        NotKnown: the reason why it cannot be read.
    """
    placed = facts.placed
    if not 0 <= stack < len(placed.streams):
        raise NotKnown(both("no residual stream was found", "没有找到残差流"))
    if facts.graph.fake:
        raise NotKnown(both("the weights hold no numbers", "权重没有数值"))
    stream = _StackReader(facts, stack)
    sublayers = stream.sublayers()
    blocks = [placed.layers.get(add.index) for add in stream.adds]
    pairs = zip(blocks, sublayers, strict=True)
    layers = tuple(tuple(s for _, parts in group for s in parts) for _, group in groupby(pairs, key=lambda p: p[0]))
    counts = torch.tensor([len(parts) for parts in sublayers]).cumsum(0) - 1
    return Described(layers, stream.moments(), stream.width, tuple(counts.tolist()))


class _StackReader:
    """Reads one stream: where each sublayer leaves it, and what lies between."""

    def __init__(self, facts: Facts, stack: int) -> None:
        self.facts, self.graph, self.reader = facts, facts.graph, Reader(facts)
        self.adds: Sequence[Residual] = facts.placed.streams[stack].adds
        self.forks = [self._fork(add) for add in self.adds]
        entering = self.graph.values[self.forks[0]]
        if len(entering.shape) != 3 or len({self._size(fork) for fork in self.forks}) > 1:
            raise NotKnown(
                both(
                    "the stream is not [batch, time, hidden] throughout", "残差流的形状不是始终为 [batch, time, hidden]"
                )
            )
        self.sequence_first = sequence_first(unwrap(facts.target.model)[0])
        self.steps, self.width = entering.shape[0 if self.sequence_first else 1], entering.shape[-1]
        if self.steps > _LONGEST:
            raise NotKnown(both(f"more than {_LONGEST} tokens", f"超过 {_LONGEST} 个 token"))

    def moments(self) -> torch.Tensor:
        """Return second moments between the tokens of what enters, from the run."""
        rows = self.facts.runs.base.of(self.forks[0]).cpu()
        moments = moments_of(rows.transpose(0, 1) if self.sequence_first else rows)
        if not bool(moments.isfinite().all()) or float(moments.diagonal().max()) <= 0:
            raise NotKnown(both("what enters the stream is not finite, or 0", "进入残差流的不是有限值，或全为 0"))
        return moments

    def sublayers(self) -> list[list[Sublayer]]:
        """Return the sublayers of each add; several where they stand side by side."""
        made = [self._sublayers(order) for order in range(len(self.adds))]
        if self.reader.repeated:
            raise NotKnown(both("sublayers hold the same weights", "各子层的权重相同"))
        return made

    def _size(self, value: int) -> tuple[int, int]:
        """Return elements and features of a value: tokens may lie along one axis or two."""
        record = self.graph.values[value]
        return record.numel, record.shape[-1]

    def _fork(self, add: Residual) -> int:
        """Return the value that the sublayer reads, the nearest to the add on its skip."""
        for value in add.skip.values:
            if any(op.id in add.region and op.id not in add.skip.ops for op in self.graph.consumers(value)):
                return value
        raise NotKnown(both("where a sublayer leaves the stream", "子层从何处离开残差流"))

    def _sublayers(self, order: int) -> list[Sublayer]:
        add, fork = self.adds[order], self.forks[order]
        skip, after = self._skip(add, fork), self._after(order)
        values = self._parts(add)
        made = []
        for number, value in enumerate(values):
            branch, leaving, entering = branch_of(self.reader, value, fork)
            if isinstance(branch, AttentionBranch) and len(branch.visible) != self.steps:
                raise NotKnown(both("attention over parts of the sequence", "注意力只在序列的部分上进行"))
            last = number + 1 == len(values)
            each = Sublayer(
                branch=branch,
                before=entering.norm,
                after_branch=leaving.norm,
                after_add=after if last else None,
                input_gain=entering.outer,
                branch_gain=leaving.outer,
                skip_gain=skip if number == 0 else 1.0,
                parallel=number > 0,
            )
            made.append(each)
        return made

    def _parts(self, add: Residual) -> list[int]:
        """Return what is added to the stream: terms of a sum are sublayers side by side."""
        terms = []
        for branch in add.branches:
            end = self.facts.streams.chain(branch)
            terms += [branch] if end.norms else list(self.facts.streams.addends(branch))
        return sorted(terms)

    def _skip(self, add: Residual, fork: int) -> float:
        """Return the square of the factors on the stream beside a sublayer."""
        way = self.reader.back(add.skip.values[0], fork)
        while (inner := self.facts.streams.made_by.get(way.end)) is not None and inner.index in add.absorbs:
            if way.outer != 1:
                raise NotKnown(_CROOKED)
            way = self.reader.back(inner.skip.values[0], fork)
        if way.end != fork or way.norm is not None or add.shortcut or add.op.kwargs.get("alpha", 1) != 1:
            raise NotKnown(_CROOKED)
        return way.outer

    def _after(self, order: int) -> Norm | None:
        """Return the norm that follows an add; None without one."""
        add = self.adds[order]
        if order + 1 < len(self.adds):
            way = self.reader.back(self.forks[order + 1], add.out)
            if way.end != add.out or way.inner != 1:
                raise NotKnown(_CROOKED)
            if way.norm is not None:
                return replace(way.norm, square=way.norm.square * way.outer)
            if way.outer != 1:
                raise NotKnown(both("a factor on the stream between sublayers", "子层之间残差流上有系数"))
            return None
        seats = self.facts.placed.seats
        for norm in self.facts.norm_calls.norms:
            seat = seats[norm.op.id]
            if seat.place is Place.POST and seat.add == add.index:
                return self.reader.norm(norm)
        return None


def beside(facts: Facts, rows: tuple[ProfileRow, ...]) -> tuple[ProfileRow, ...]:
    """Return rows of a profile with what is expected beside what was measured.

    Gradients are predicted relative to the end of the stream: they are drawn through the measured one at the last
    sublayer, where each token's output has a gradient of its own: in models of one stream, for an encoder's tokens get
    one that they share by way of the decoder's attention.

    Raises:
        NotKnown: no stack can be read; the reason is the first one's.
    """
    found: dict[tuple[int, int], ProfileRow] = {}
    refused: NotKnown | None = None
    for index in range(len(facts.placed.streams)):
        mine = [row for row in rows if row.stack == index]
        try:
            read = described(facts, index)
        except NotKnown as unknown:
            refused = refused or unknown
            continue
        alone = len(facts.placed.streams) == 1
        found |= {(row.stack, row.sublayer): row for row in _with_theory(read, mine, gradients=alone)}
    if refused is not None and not found:
        raise refused
    return tuple(found.get((row.stack, row.sublayer), row) for row in rows)


def _with_theory(read: Described, rows: list[ProfileRow], *, gradients: bool) -> list[ProfileRow]:
    told = read.predict()
    last = rows[-1]
    share = last.grad_first_share
    alike = gradients and share is not None and 1 / _ALIKE <= share * len(read.moments) <= _ALIKE
    end = last.grad_rms / told.added_gradient[-1] if alike and last.grad_rms is not None else None
    layer_of = [number for number, layer in enumerate(read.layers) for _ in layer]
    made = []
    for row, step in zip(rows, read.adds, strict=True):
        layer = layer_of[step]
        closes = step + 1 == len(layer_of) or layer_of[step + 1] != layer
        made.append(
            replace(
                row,
                predicted_rms=told.added[step] ** 0.5,
                predicted_grad=None if end is None else told.added_gradient[step] * end,
                predicted_influence=told.block_influence[layer] if closes else None,
            )
        )
    return made
