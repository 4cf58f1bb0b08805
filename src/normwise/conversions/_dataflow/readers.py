"""Who reads what a norm returns: every linear map behind it, found in the traced graph.

The gain is followed from the product in which it is applied, along its axis, through ops that carry that axis, to
the contractions with a parameter in which it ends. Where it reaches anything else the norm is ``Blocked``, with the
op that stands in the way: what is not known never counts as a reader.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from normwise.conversions._dataflow.axes import carriers
from normwise.conversions._dataflow.contractions import VIEWS, Reader, reader_at
from normwise.conversions._dataflow.operands import reads_numbers
from normwise.conversions._plan import Blocked
from normwise.facts import vocabulary as ops
from normwise.facts.facts import Facts
from normwise.facts.norms import NormCall
from normwise.facts.sites import Site
from normwise.graph import Graph, Op, Ref

__all__ = ["Reader", "Readers", "leaves", "readers_of"]

_TRAILING = frozenset({"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"})
_CHANNELS = frozenset({"group_norm", "native_group_norm", "instance_norm"})
# a vector that is the same at every position stays so; padding with zeros, sums and factors change it
_STEADY = (ops.VIEW - {"pad", "constant_pad_nd"}) | {"cat", "concat", "stack", "mean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """All readers of one norm, over all its calls.

    Args:
        readers: by op, in order.
        scopes: paths of the modules that are given what the norm returns, and of those that hold the readers.
        unsteady: an op behind which the bias is no longer one vector at every position, or None.
    """

    readers: tuple[Reader, ...]
    scopes: tuple[str, ...]
    unsteady: Op | None


def readers_of(facts: Facts, site: Site, gain: int | None, bias: int | None) -> Readers:
    """Return the readers of a norm.

    Args:
        facts: of the target.
        site: the norm.
        gain: value id of its gain, or None.
        bias: value id of its bias, or None; one of the two is given.

    Raises:
        Blocked: something else reads it as well.
    """
    return _Walk(facts, site, gain, bias).found()


def leaves(graph: Graph, parameter: int, *, offset: bool = False) -> frozenset[int]:
    """Return the ids of the ops that read a parameter, its views, and with ``offset`` the sums of it and a number."""
    found, pending = set(), [parameter]
    while pending:
        value = pending.pop()
        for op in graph.consumers(value):
            shifted = offset and op.short in ops.ADD and all(i == value or _number(graph, i) for i in op.inputs)
            if (op.short in VIEWS and op.inputs[0] == value) or shifted:
                pending.extend(op.outputs)
            else:
                found.add(op.id)
    return frozenset(found)


def _is_steady(op: Op) -> bool:
    mode = op.args[2] if op.short == "pad" and len(op.args) > 2 else "constant"
    return op.short in _STEADY or mode != "constant"


def _number(graph: Graph, value: int) -> bool:
    return graph.values[value].scalar is not None


@dataclass(frozen=True, slots=True)
class _State:
    """How a value holds the gain: along ``axis``; ``shifted`` where the bias was added."""

    axis: int
    shifted: bool


class _Walk:
    def __init__(self, facts: Facts, site: Site, gain: int | None, bias: int | None) -> None:
        self.facts, self.site, self.graph = facts, site, facts.graph
        self.gain, self.bias = gain, bias
        self.members = frozenset(m for call in site.calls for m in call.members | {call.op.id})
        self.gain_ops = leaves(self.graph, gain, offset=True) if gain is not None else frozenset[int]()
        self.bias_ops = leaves(self.graph, bias) if bias is not None else frozenset[int]()
        self.state: dict[int, _State] = {}
        self.readers: dict[int, Reader] = {}
        self.unsteady: Op | None = None
        self.pending: list[int] = []

    def found(self) -> Readers:
        for call in self.site.calls:
            self._start(call)
        done = set[int]()
        while self.pending:
            op = self.graph.ops[heapq.heappop(self.pending)]
            if op.id not in done:
                done.add(op.id)
                self._pass(op)
        for call in self.site.calls:
            end = self.state.get(call.output)
            if end is None or end.shifted != (self.bias is not None):
                raise Blocked("what follows its gain is not understood", call.op)
        if not self.readers:
            raise Blocked("no linear map reads it")
        return Readers(
            readers=tuple(self.readers[i] for i in sorted(self.readers)), scopes=self._scopes(), unsteady=self.unsteady
        )

    # -- where the gain is applied -----------------------------------------------------------------

    def _start(self, call: NormCall) -> None:
        """Find the product with the gain, or the sum with the bias where there is no gain."""
        starting = self.gain_ops if self.gain is not None else self.bias_ops
        outside = starting - self.members
        if outside:
            op = self.graph.ops[min(outside)]
            raise Blocked(f"its parameters are used elsewhere as well, in {self._place(op)}", op)
        for op in (self.graph.ops[i] for i in sorted(starting & (call.members | {call.op.id}))):
            axis, shifted = self._applied(op, call)
            self._hold(op, op.outputs[0], _State(axis, shifted))

    def _applied(self, op: Op, call: NormCall) -> tuple[int, bool]:
        """Return the axis of the gain in the result of the op that applies it, and whether the bias is added there."""
        parameter = self.gain if self.gain is not None else self.bias
        assert parameter is not None
        size, out = self.graph.values[parameter].numel, self.graph.values[op.outputs[0]].shape
        shifted = op.id in self.bias_ops
        if size > 1 and op.short in _TRAILING and out[-1] == size:
            return -1, shifted
        if size > 1 and op.short in _CHANNELS:
            return 1 - len(out), shifted
        if op.short in ops.MUL | ops.ADD | {"addcmul"}:
            held = [i for i in op.inputs if self._from(i, parameter)]
            axes = [a for a, n in enumerate(self.graph.values[held[0]].shape) if n > 1] if len(held) == 1 else []
            if len(axes) == 1:
                axis = axes[0] - len(self.graph.values[held[0]].shape)
                if self.graph.values[held[0]].numel == size == out[axis]:
                    return axis, shifted
            if size == 1 and call.spec is not None and len(call.spec.axes) == 1 and out[call.spec.axes[0]] > 1:
                return call.spec.axes[0], shifted
        raise Blocked("its gain is no vector along one axis, multiplied in at the end", op)

    def _from(self, value: int, parameter: int) -> bool:
        """Whether a value is a parameter, a view of it, or the sum of it and a number."""
        while value != parameter:
            op = self.graph.producer(value)
            if op is None or op.short not in VIEWS | ops.ADD or not op.inputs:
                return False
            value = next((i for i in op.inputs if not _number(self.graph, i)), op.inputs[0])
        return True

    # -- where it goes -----------------------------------------------------------------------------

    def _hold(self, op: Op, value: int, state: _State) -> None:
        if value in self.graph.outputs:
            raise Blocked("what it returns is an output of the model", op, "wrap the model so that it is not returned")
        self.state[value] = state
        for reader in self.graph.consumers(value):
            heapq.heappush(self.pending, reader.id)

    def _pass(self, op: Op) -> None:
        """Take one op that reads a value with the gain: a reader, a carrier, or an obstacle."""
        held = [i for i in dict.fromkeys(op.inputs) if i in self.state and reads_numbers(op, i)]
        if not held or all(o in self.state for o in op.outputs):
            return
        if len(held) == 1 and op.inputs.count(held[0]) == 1:
            reader = reader_at(self.facts.flow, op, held[0], self.state[held[0]].axis)
            if reader is not None:
                self.readers[op.id] = reader
                return
        for out in op.outputs:
            state = self._inside(op, held) if op.id in self.members else None
            state = state or self._carried(op, out, held)
            if state is None:
                raise Blocked(self._obstacle(op), op)
            self._hold(op, out, state)

    def _inside(self, op: Op, held: list[int]) -> _State | None:
        """What a norm does between its gain and its end: further factors, then the bias."""
        state = self.state[held[0]]
        out = self.graph.values[op.outputs[0]].shape
        same = len(held) == 1 and op.inputs.count(held[0]) == 1 and self.graph.values[held[0]].shape == out
        if op.id in self.bias_ops and op.short in ops.ADD and same and not state.shifted:
            return _State(state.axis, True)
        divided = op.short in ops.DIV and op.args[0] == Ref(held[0])
        wide = len(held) == 1 and op.inputs.count(held[0]) == 1 and len(out) >= -state.axis
        kept = wide and self.graph.values[held[0]].shape[state.axis] == out[state.axis]
        return state if (op.short in ops.MUL or divided) and kept and not state.shifted else None

    def _carried(self, op: Op, out: int, held: list[int]) -> _State | None:
        """An op through which a factor along the axis passes."""
        first, shape = self.state[held[0]], self.graph.values[out].shape
        size = self.graph.values[held[0]].shape[first.axis]
        axes = sorted((a for a in range(-len(shape), 0) if shape[a] == size), key=lambda a: a != first.axis)
        for axis in axes:
            found = carriers(self.graph, op, out, axis)
            if not found or {v for v, _ in found} != set(held):
                continue
            if any(self.state[v].axis != a or self.state[v].shifted != first.shifted for v, a in found):
                continue
            if op.short in ops.JOIN and any(self.graph.values[i].numel == 0 for i in op.inputs):
                raise Blocked("a cache keeps it", op)  # which a caller may have filled before
            if first.shifted and not _is_steady(op) and self.unsteady is None:
                self.unsteady = op
            return _State(axis, first.shifted)
        return None

    def _obstacle(self, op: Op) -> str:
        if op.short in ops.ADD | ops.SUB:
            return f"it is added to another value in {self._place(op)}"
        other = next((n for n in self.facts.norm_calls.norms if op.id in n.members and op.id not in self.members), None)
        if other is not None:
            return f"another norm reads it, {self.graph.calls[other.call].path or 'in the model'}"
        if op.short in ops.ATTENTION:
            return f"an attention reads it, in {self._place(op)}"
        if op.short in ops.POINTWISE:
            return f"an elementwise op reads it, in {self._place(op)}"
        if op.short in ops.VIEW | ops.JOIN:
            return f"its features are taken apart, merged or joined with others by {op.short}, in {self._place(op)}"
        return f"{op.short} reads it, in {self._place(op)}, and is no linear map with a weight of its own"

    def _place(self, op: Op) -> str:
        return self.graph.path(op) or "the model itself"

    def _scopes(self) -> tuple[str, ...]:
        """Return the modules that are given a value behind the norm, and those of the readers."""
        owners = {call.call for call in self.site.calls}
        given = [c.path for c in self.graph.calls if c.id not in owners and any(v in self.state for v in c.inputs)]
        return tuple(dict.fromkeys([*given, *(r.path for r in self.readers.values())]))
