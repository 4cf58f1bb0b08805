"""The residual adds of a model as they run: the size of stream and branch, and how far each layer turns its tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from normwise.facts import vocabulary as ops
from normwise.facts.chains import Residual
from normwise.facts.placing import Placed
from normwise.facts.records import Place
from normwise.facts.tokens import Directions
from normwise.graph import Graph
from normwise.graph.capture import Overwritten
from normwise.graph.provenance import CallStack

__all__ = ["Add", "AddWatch", "Seen", "adds_of"]

# an op is found again by the module call it runs in, its name, its output shape, and its order among those
_Key = tuple[str, int, str, tuple[int, ...], int]
# a norm at one of these places fixes the size of what its sublayer reads or writes
_ABSOLUTE = frozenset({Place.PRE, Place.BRANCH, Place.INNER, Place.V})


@dataclass(frozen=True, slots=True)
class Add:
    """One residual add: where it stands, and which tensors of which ops are its stream and its branches."""

    op: int
    stack: int
    order: int  # in its stack
    entered: int  # order of the add that ended the layer before, -1 in the first layer
    ends_layer: bool
    normed: bool  # whether a norm fixes the size of what the branch reads or writes
    skip_scale: float
    operands: dict[int, tuple[int | None, tuple[int, ...]]]  # by op, in order: position of the skip, of the branches


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured at one residual add."""

    residual_rms: float | None = None
    branch_rms: float | None = None
    branch_gain: float | None = None
    token_cosine: float | None = None
    block_influence: float | None = None


def adds_of(graph: Graph, placed: Placed, residuals: Sequence[Residual]) -> Iterator[Add]:
    """Yield the residual adds of the main streams.

    Args:
        graph: the traced program.
        placed: the streams and norms in it.
        residuals: all residual adds by index, those merged into others included.
    """
    seated = {seat.add for seat in placed.seats.values() if seat.place in _ABSOLUTE}
    for stack, stream in enumerate(placed.streams):
        layers = [placed.layers.get(add.index) for add in stream.adds]
        last = [here != behind for here, behind in pairwise([*layers, object()])]
        entered = -1
        for order, (add, ends_layer) in enumerate(zip(stream.adds, last, strict=True)):
            yield Add(
                op=add.op.id,
                stack=stack,
                order=order,
                entered=entered,
                ends_layer=ends_layer,
                normed=bool(add.skip.norms) or add.index in seated,
                skip_scale=math.prod(add.skip.scales),
                operands=_operands(add, residuals),
            )
            entered = order if ends_layer else entered


def _operands(add: Residual, residuals: Sequence[Residual]) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """Return, for each op of an add (a parallel sum has several), which tensors are the stream and the branches."""
    stream = set(add.skip.values)
    found = {}
    for op in sorted((add.op, *(residuals[i].op for i in add.absorbs)), key=lambda op: op.id):
        skip = next((i for i, value in enumerate(op.inputs) if value in stream), None)
        found[op.id] = (skip, tuple(i for i, value in enumerate(op.inputs) if value not in stream))
    return found


def _keys(graph: Graph) -> dict[int, _Key]:
    counts: Counter[tuple[str, int, str, tuple[int, ...]]] = Counter()
    keys = {}
    for op in graph.ops:
        if not op.outputs or op.namespace != "aten":
            continue
        call = graph.calls[op.call]
        key = (call.path, call.ordinal, op.short, graph.values[op.outputs[0]].shape)
        keys[op.id] = (*key, counts[key])
        counts[key] += 1
    return keys


class AddWatch(TorchDispatchMode):
    """Measures residual adds while a run with gradients goes by, and keeps where they stand in autograd's graph."""

    def __init__(
        self, graph: Graph, adds: Sequence[Add], calls: CallStack, overwritten: Overwritten, position_axis: int
    ) -> None:
        super().__init__()
        self.calls, self.overwritten, self.position_axis = calls, overwritten, position_axis
        keys = _keys(graph)
        self.wanted = {keys[op]: (op, add) for add in adds for op in add.operands}
        self.shapes = {key[:-1] for key in self.wanted}
        self.counts: Counter[Any] = Counter()
        self.seen: dict[int, Seen] = {}
        self.edges: dict[int, GradientEdge] = {}
        self._latest: tuple[int, torch.Tensor] | None = None
        self._branches: dict[int, torch.Tensor | None] = {}  # of adds whose later ops are still to come
        self._reads: dict[int, float] = {}  # second moment of the stream that a branch without a norm reads
        self._entered: dict[int, tuple[int, Directions]] = {}  # by stack: the stream that entered the present layer

    def settle(self) -> None:
        """Remember where the latest add stands in autograd's graph.

        Autograd records an op after this mode has seen it, and a later write in place moves the tensor on: the
        moment between is the next op.
        """
        if self._latest is not None and self._latest[1].requires_grad:
            self.edges[self._latest[0]] = get_gradient_edge(self._latest[1])
        self._latest = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.settle()
        self.overwritten.before(func, args, kwargs or {})
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and getattr(func, "namespace", "") == "aten":
            call = self.calls.calls[self.calls.current]
            name = func.overloadpacket.__name__
            key = (call.path, call.ordinal, name.removesuffix("_"), tuple(output.shape))
            if key in self.shapes:
                op, add = self.wanted.get((*key, self.counts[key]), (None, None))
                self.counts[key] += 1
                if op is not None and add is not None and output.is_floating_point() and output.numel():
                    self._measure(op, add, name, output, args, kwargs or {})
        return output

    def _measure(self, op: int, add: Add, name: str, output: torch.Tensor, args: Any, kwargs: Any) -> None:
        operands = [a for a in args if isinstance(a, torch.Tensor)]
        skip, positions = add.operands[op]
        stream = operands[skip].detach() if skip is not None and skip < len(operands) else None
        wide = output.detach().double()
        branch = _branch(name, wide, stream, [(p, operands[p]) for p in positions if p < len(operands)], kwargs)
        if op == next(iter(add.operands)):
            # an op in place has overwritten its stream
            before = stream if not name.endswith("_") else wide - branch if branch is not None else None
            self._enter(add, before, kwargs)
            self._branches[add.op] = branch
        else:
            sum_ = self._branches.get(add.op)
            self._branches[add.op] = None if sum_ is None or branch is None else sum_ + branch
        if op == add.op:
            self.seen[op] = self._finish(add, wide)
            self._latest = (op, output)

    def _enter(self, add: Add, stream: torch.Tensor | None, kwargs: Any) -> None:
        """Keep what is needed of the stream before an add."""
        if stream is None:
            return
        if not add.normed and add.skip_scale:
            self._reads[add.op] = float(stream.double().square().mean()) / add.skip_scale**2
        if add.order == 0 and (directions := Directions.of(stream)) is not None:
            self._entered[add.stack] = (-1, directions)

    def _finish(self, add: Add, wide: torch.Tensor) -> Seen:
        branch = self._branches.pop(add.op, None)
        size = None if branch is None else float(branch.square().mean())
        read = 1.0 if add.normed else self._reads.pop(add.op, None)
        directions = Directions.of(wide)
        influence = None
        if directions is not None and add.ends_layer:
            order, before = self._entered.pop(add.stack, (None, None))
            if before is not None and order == add.entered:
                influence = directions.influence_after(before)
            self._entered[add.stack] = (add.order, directions)
        return Seen(
            residual_rms=float(wide.square().mean().sqrt()),
            branch_rms=None if size is None else math.sqrt(size),
            branch_gain=size / read if size is not None and read else None,
            token_cosine=None if directions is None else directions.cosine_within(self.position_axis),
            block_influence=influence,
        )


def _branch(
    name: str, output: torch.Tensor, stream: torch.Tensor | None, ends: list[tuple[int, torch.Tensor]], kwargs: Any
) -> torch.Tensor | None:
    """Return in float64 what an op adds to the stream: its other operands, or the output less the stream."""
    if stream is None or not ends:
        return None
    short = name.removesuffix("_")
    if short in ops.ADD | ops.SUB:
        # torch scales the second operand by alpha; a difference is off by its sign only
        alpha = kwargs.get("alpha", 1)
        parts = [end.detach().double() * alpha if at and alpha != 1 else end.detach().double() for at, end in ends]
        return sum(parts[1:], parts[0]).expand(output.shape)
    if name.endswith("_") or kwargs.get("beta", 1) != 1:
        return None
    return output - stream
