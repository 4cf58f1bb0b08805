"""Where a model's residual streams can be centred: which writers absorb it, where a mean must be subtracted, for
which norms it makes RMSNorm of LayerNorm.

LN(x) = RMS(Cx), where C subtracts the mean over the features. For every value on a stream, as each module sees it,
two questions are asked: may it differ from the original by a shift, a number a token along the feature axis (s), and
is it centred (c). Ops that carry the axis pass both on, a LayerNorm over it forgets the shift, anything else must not
see one. A parameter that only writes to streams is centred for nothing; anything else needs a subtraction where a
module returns or is given the value, since only there can one be put without touching the user's code. What is best
is a minimum cut: a norm gains 1, a subtraction costs a little more than 1.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from normwise.conversions._dataflow.axes import carriers, is_zero
from normwise.conversions._dataflow.idle import idle_parameters
from normwise.conversions._dataflow.liveness import ends, live_uses
from normwise.conversions._dataflow.operands import reads_numbers
from normwise.conversions._dataflow.questions import Questions
from normwise.conversions._dataflow.scaled import ScaledWriter, scaled_writer
from normwise.conversions._edits import strange_hooks
from normwise.facts import vocabulary as ops
from normwise.facts.facts import Facts
from normwise.facts.flow import through_casts
from normwise.facts.norms import NormCall
from normwise.facts.sites import Site
from normwise.graph import Op, ValueKind
from normwise.spec import Scope, Statistic

__all__ = ["Cut", "Hook", "Obstacle", "Streams", "centred_axis"]

# a subtraction costs more than the one that a norm saves, and a little more the later it stands in the program
_NORM, _AT_OUTPUT, _AT_INPUT, _LATEST = 1_000_000, 1_001_000, 1_002_000, 999
# keeps all elements
_WHOLE = ops.CAST | {"view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "permute", "transpose"}
Seen = tuple[int, int, int]
"""A value along one axis as one call sees it: (value, axis, call)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """A subtraction of the mean where a module returns a value, or is given one."""

    call: int
    value: int
    axis: int
    output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """What keeps a value from being centred, or from being shifted."""

    value: int
    op: Op | None
    kind: str  # "writer", "leaf": not centred by itself; "reader", "output", "hook": must not see a shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What is centred."""

    norms: tuple[Site, ...]
    hooks: tuple[Hook, ...]
    parameters: tuple[tuple[int, int], ...]  # value id and axis
    scaled: tuple[ScaledWriter, ...]


def centred_axis(norm: NormCall) -> int | None:
    """Return the one axis of a LayerNorm, of any divisor and eps, or None."""
    spec = norm.spec
    if spec is None or not spec.center or spec.scope is not Scope.HIDDEN or len(spec.axes) != 1 or spec.running:
        return None
    if spec.statistic is not Statistic.VARIANCE or spec.partial != 1 or spec.weight_on_input:
        return None
    return spec.axes[0]


def _forgets_the_mean(norm: NormCall) -> bool:
    """Whether what a LayerNorm returns has a mean of zero: it has neither gain nor shift."""
    spec = norm.spec
    return spec is not None and spec.weight == "none" and not spec.bias and spec.modulation == "none"


class Streams:
    """Every stream that a LayerNorm reads, with what writes and reads it.

    Args:
        facts: of the model.
        sites: norms that may be converted.
        shifted_outputs: outputs of the model may be shifted by a number a token (the user's consent).
        untie: a tied parameter may be copied where another module reads it.
    """

    def __init__(
        self, facts: Facts, sites: Iterable[Site], *, shifted_outputs: bool = False, untie: bool = False
    ) -> None:
        self.facts, self.graph = facts, facts.graph
        self.sites = tuple(sites)
        self.shifted_outputs, self.untie = shifted_outputs, untie
        self.ends = ends(self.graph)
        self.uses = live_uses(self.graph, self.ends)
        self.times = Counter(call.path for call in self.graph.calls)
        self._ran = {id(facts.modules[path]) for path in self.times if path in facts.modules}
        self.member: dict[int, NormCall] = {}
        for norm in facts.norm_calls.norms:
            self.member.update(dict.fromkeys(norm.members, norm))
        self.hooked = self._seen_by_hooks()
        self.idle = idle_parameters(facts)
        self.obstacles: dict[tuple[int, int], list[Obstacle]] = defaultdict(list)
        self.up: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        self.down: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self.scaled: dict[tuple[int, int], ScaledWriter] = {}
        self.untied: dict[int, set[str]] = defaultdict(set)
        self._hooks: dict[tuple[object, object], Hook] = {}
        self._program = Questions()
        self._parameters: set[tuple[int, int]] = set()
        self._grow()

    def cut(self) -> Cut:
        """Return the best set of norms to convert."""
        for number, site in enumerate(self.sites):
            for norm in site.calls:
                axis = centred_axis(norm)
                assert axis is not None
                self._program.implies(("norm", number), ("c", *self._seen(norm.input, axis, norm.op.call)))
            self._program.gains(("norm", number), _NORM)
        yes = self._program.solved()
        return Cut(
            norms=tuple(site for number, site in enumerate(self.sites) if ("norm", number) in yes),
            hooks=tuple(hook for (a, b), hook in self._hooks.items() if b in yes and a not in yes),
            parameters=tuple((v, a) for v, a in sorted(self._parameters) if ("c", v, a, -1) in yes),
            scaled=tuple(w for (v, a), w in self.scaled.items() if ("c", v, a, w.op.call) in yes),
        )

    # -- the closure: every value on a stream -------------------------------------------------------------

    def _grow(self) -> None:
        seeds = [(n.input, a) for n in self.facts.norm_calls.norms if (a := centred_axis(n)) is not None]
        pending, seen = deque(seeds), set(seeds)
        while pending:
            value, axis = pending.popleft()
            for near in (*self._written(value, axis), *self._read(value, axis)):
                if near not in seen:
                    seen.add(near)
                    pending.append(near)

    def _written(self, value: int, axis: int) -> tuple[tuple[int, int], ...]:
        """Say what a value's centring depends on; return the operands that carry it."""
        graph, program = self.graph, self._program
        node = self._origin(value, axis)
        program.implies(("c", *node), ("s", *node))
        op = graph.producer(value)
        if op is None:
            if self._is_writable(value):
                self._parameters.add((value, axis))
            else:
                self._stands(value, axis, None, "leaf")
            return ()
        if self._is_centred(op, value, axis):
            return ()
        scaled = scaled_writer(graph, self.uses, self.member, op, value, axis)
        if scaled is not None:
            self.scaled[value, axis] = scaled
            return ()
        found = None if op.id in self.member else carriers(graph, op, value, axis)
        if found is None:
            self._stands(value, axis, op, "writer")
            return ()
        for operand in found:
            at = self._seen(*operand, op.call)
            program.implies(("c", *node), ("c", *at))
            program.implies(("s", *at), ("s", *node))
            self.down[operand].append((value, axis))
        self.up[value, axis] = found
        return found

    def _stands(self, value: int, axis: int, op: Op | None, kind: str) -> None:
        """Note that a value is not centred by itself."""
        self.obstacles[value, axis].append(Obstacle(value=value, op=op, kind=kind))
        self._program.no(("c", *self._origin(value, axis)))

    def _is_centred(self, op: Op, value: int, axis: int) -> bool:
        norm = self.member.get(op.id)
        if norm is None:
            return is_zero(op)
        return value == norm.output and centred_axis(norm) == axis and _forgets_the_mean(norm)

    def _is_writable(self, value: int) -> bool:
        record = self.graph.values[value]
        if record.kind not in (ValueKind.PARAM, ValueKind.BUFFER) or not record.floating or not record.names:
            return False
        if record.kind is ValueKind.PARAM:
            return self._shared_with_idle(value) is None
        path, _, name = record.names[0].rpartition(".")
        return name not in self.facts.modules[path]._non_persistent_buffers_set and self._is_whole(value)

    def _is_whole(self, value: int) -> bool:
        """Whether a buffer is never taken in part: positions that are may be made anew for a longer input."""
        for op in self.uses[value]:
            if op.short == "embedding" or (op.short in ops.VIEW and op.short not in _WHOLE):
                return False
            if op.short in _WHOLE and not all(map(self._is_whole, op.outputs)):
                return False
        return True

    def _shared_with_idle(self, value: int) -> str | None:
        """Return a name of a tied parameter in a module that did not run: what it would do with it is not known.

        One of the same type as another that ran does what that does: an embedding that two stacks have copies of.
        """
        names = self.graph.values[value].names
        owners = {name: self.facts.modules[name.rpartition(".")[0]] for name in names}
        ran = {type(module) for module in owners.values() if id(module) in self._ran}
        return next((name for name, module in owners.items() if type(module) not in ran), None) if ran else None

    def _read(self, value: int, axis: int) -> Iterator[tuple[int, int]]:
        """Say what must not see a shift of a value; yield the results that carry it on."""
        graph = self.graph
        if value in graph.outputs and not self.shifted_outputs:
            self._forbids(value, axis, 0, None, "output")
        for call in self.hooked.get(value, ()):
            self._forbids(value, axis, call, None, "hook")
        for op in self.uses[value]:
            if not reads_numbers(op, value) or self._is_norm_of(op, value, axis):
                continue
            carried = list(self._carried(op, value, axis))
            if op.id in self.ends or len({out for out, _ in carried}) < sum(self._matters(out) for out in op.outputs):
                if not self._is_untied(op, value):
                    self._forbids(value, axis, op.call, op, "reader")
                continue
            yield from carried

    def _seen_by_hooks(self) -> dict[int, list[int]]:
        """Return the values that hooks of the user see, with the calls around which they see them."""
        seen: dict[int, list[int]] = defaultdict(list)
        for call in self.graph.calls:
            if call.path in self.facts.modules and strange_hooks(self.facts.modules[call.path]):
                for value in (*call.inputs, *call.outputs):
                    seen[value].append(call.parent)
        return seen

    def _matters(self, value: int) -> bool:
        return bool(self.uses[value]) or value in self.graph.outputs

    def _carried(self, op: Op, value: int, axis: int) -> Iterator[tuple[int, int]]:
        if op.id in self.member:
            return
        size = self.graph.values[value].shape[axis]
        for out in op.outputs:
            shape = self.graph.values[out].shape
            for at in range(-1, -len(shape) - 1, -1):
                if shape[at] != size:
                    continue
                found = carriers(self.graph, op, out, at)
                if found and (value, axis) in found:
                    yield out, at
                    break

    def _forbids(self, value: int, axis: int, call: int, op: Op | None, kind: str) -> None:
        self.obstacles[value, axis].append(Obstacle(value=value, op=op, kind=kind))
        self._program.no(("s", *self._seen(value, axis, call)))

    def _is_norm_of(self, op: Op, value: int, axis: int) -> bool:
        """Whether an op belongs to a LayerNorm over the axis of this very value."""
        norm = self.member.get(op.id)
        if norm is None:
            return False
        source = through_casts(self.facts.flow, norm.input)
        return centred_axis(norm) == axis and through_casts(self.facts.flow, value) == source

    def _is_untied(self, op: Op, value: int) -> bool:
        """Whether a reader of a tied parameter can have a copy of its own."""
        names = self.graph.values[value].names
        own = next((n for n in names if n.rpartition(".")[0] == self.graph.path(op)), None)
        if not self.untie or own is None or len(names) < 2:
            return False
        self.untied[value].add(own)
        return True

    # -- who sees a value, and where a mean can be subtracted in between -------------------------------------

    def _origin(self, value: int, axis: int) -> Seen:
        op = self.graph.producer(value)
        if op is not None:
            return value, axis, op.call
        learned = self.graph.values[value].kind in (ValueKind.PARAM, ValueKind.BUFFER)
        return value, axis, -1 if learned else 0

    def _seen(self, value: int, axis: int, call: int) -> Seen:
        """Return a value as the body of a call sees it, behind every place where a mean could be subtracted."""
        at = self._origin(value, axis)[2]
        if at < 0:
            return value, axis, -1
        for through, output in self._steps(at, call):
            if self._can_hook(value, through, output):
                seen = self.graph.calls[through].parent if output else through
                self._hookable(value, axis, at, seen, Hook(call=through, value=value, axis=axis, output=output))
                at = seen
        return value, axis, at

    @functools.cache  # noqa: B019 - the object lives as long as one plan is made
    def _steps(self, start: int, end: int) -> tuple[tuple[int, bool], ...]:
        """Return the calls left (True) and entered (False) between the bodies of two calls."""
        outer = [call.id for call in self.graph.ancestors(start)]
        inner = [call.id for call in self.graph.ancestors(end)]
        common = next(call for call in outer if call in inner)
        left = [(call, True) for call in outer[: outer.index(common)]]
        return (*left, *((call, False) for call in reversed(inner[: inner.index(common)])))

    def _can_hook(self, value: int, call: int, output: bool) -> bool:
        record = self.graph.calls[call]
        given, returned = value in record.inputs, value in record.outputs
        return self.times[record.path] == 1 and (returned if output else given) and given != returned

    def _hookable(self, value: int, axis: int, before: int, behind: int, hook: Hook) -> None:
        a, b = (value, axis, before), (value, axis, behind)
        program = self._program
        program.implies(("s", *a), ("s", *b))
        program.implies(("c", *a), ("c", *b))
        program.implies(("c", *b), ("s", *b))
        later = min(self.graph.calls[hook.call].id, _LATEST)
        program.costs(("c", *b), ("c", *a), (_AT_OUTPUT if hook.output else _AT_INPUT) + later)
        self._hooks[("c", *a), ("c", *b)] = hook

    # -- reasons ----------------------------------------------------------------------------------------------

    def nearest(self, value: int, axis: int) -> list[Obstacle]:
        """Return what stands nearest in the way: readers behind a value, else whatever is on the way back."""
        behind = self._first(value, axis, lambda node: self.down.get(node, ()))
        shifted = [obstacle for obstacle in behind if obstacle.kind not in ("writer", "leaf")]
        return shifted or self._first(value, axis, lambda node: self.up.get(node, ()))

    def _first(
        self, value: int, axis: int, further: Callable[[tuple[int, int]], Iterable[tuple[int, int]]]
    ) -> list[Obstacle]:
        ring, seen = [(value, axis)], {(value, axis)}
        while ring:
            found = [obstacle for node in ring for obstacle in self.obstacles.get(node, ())]
            if found:
                return found
            ring = list(dict.fromkeys(n for node in ring for n in further(node) if n not in seen))
            seen.update(ring)
        return []
