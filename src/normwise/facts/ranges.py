"""Which values of the example run leave the range of their dtype, and where the first of them came from.

The search goes backward from what is not finite in the end (an output, a norm) along values that are not finite, to
the op that made it of finite ones: a norm that turns inf into NaN is passed on the way and is a victim. Infinity that
nobody computed (a mask filled with -inf) is declared, and so is what it spreads to as long as it stays infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from normwise.errors import NormwiseError, NotKnown
from normwise.facts import vocabulary as ops
from normwise.facts.calls import NormCall
from normwise.facts.runs import Run
from normwise.graph import Op, Value, ValueKind

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["HALF", "Failure", "How", "Origin", "Ranges", "peak"]

HALF = ("float16", "bfloat16")
# A mask written as a number: transformers add finfo.min, others -1e4 (the largest round one that float16 holds)
_MASKING = -1e4
_MASK_LEVELS = 4  # different numbers in a mask: 0, the large one, and their sums

_ROOTS = frozenset({"sqrt", "rsqrt", "pow", "std", "linalg_vector_norm"})
_LOGS = frozenset({"log", "log2", "log10", "log1p", "log_softmax", "_log_softmax", "logit", "logsumexp"})
_QUOTIENTS = ops.DIV | frozenset({"reciprocal", "rsqrt", "addcdiv"})


class How(StrEnum):
    """What made the first value that is not finite."""

    OVERFLOW = "overflow"
    ZERO_BY_ZERO = "0/0"
    BY_ZERO = "x/0"
    DIFFERENCE = "inf-inf"
    PRODUCT = "0*inf"
    DOMAIN = "domain"  # the root or logarithm of a negative number
    LOG_OF_ZERO = "log of 0"
    MASKED_ROW = "row masked everywhere"
    GIVEN = "given"  # an input, a parameter or a buffer holds it
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The first value that is not finite."""

    value: int
    op: Op | None  # None: an input, a parameter or a buffer
    path: str  # the module that runs the op; the name of what was given
    how: How
    dtype: str
    bad: int  # elements that are not finite
    peak32: float | None  # largest magnitude of the same value in a float32 copy, where one was run
    norm: NormCall | None  # the norm that the op is a part of

    @property
    def limit(self) -> float:
        """The largest number of the dtype."""
        return torch.finfo(getattr(torch, self.dtype)).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One chain from an origin to what is not finite in the end."""

    origin: Origin
    surfaced: str  # path of the first module on the way whose value is NaN, or of the end
    victims: tuple[NormCall, ...]  # norms that were given what is not finite and handed it on
    reached: str  # "outputs" or the path of a norm
    bad: int  # elements of the end that are not finite
    bad32: int | None  # the same in a float32 copy
    only_negative: bool  # nothing but -inf arrives


def peak(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude of a tensor, 0 where it holds none."""
    if tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().abs().float().nan_to_num(nan=0.0, posinf=0.0).max())


@dataclass(slots=True)
class _Seen:
    """What is not finite in one value."""

    nan: int
    positive: int
    negative: int
    declared: bool = False

    @property
    def bad(self) -> int:
        return self.nan + self.positive + self.negative


@dataclass
class Ranges:
    """What leaves the range in the example run."""

    facts: Facts
    _memo: dict[int, _Seen | None] = field(default_factory=dict)

    @cached_property
    def run(self) -> Run:
        """The example run with its values."""
        return self.facts.runs.base

    @cached_property
    def float32(self) -> Run | None:
        """The same in float32; None where the model cannot run in it. One more pass."""
        try:
            return self.facts.runs.float32
        except NormwiseError:
            return None

    @cached_property
    def failure(self) -> Failure | None:
        """The chain behind what is not finite in the end, None where everything is.

        Raises:
            NotKnown: the model holds no numbers, or the values on the way were not kept.
        """
        for reached, value in self._ends():
            seen = self._seen(value)
            if seen is not None and not seen.declared:
                return self._trace(value, reached, seen)
        return None

    def _ends(self) -> list[tuple[str, int]]:
        graph = self.facts.traced.graph
        found = [("outputs", v) for v in graph.outputs if graph.values[v].floating]
        calls = self.facts.norm_calls.norms
        return found + [(graph.calls[n.call].path, n.output) for n in calls]

    def fails(self, call: NormCall) -> bool:
        """Whether a norm makes something that is not finite of a finite input, in the example run."""
        try:
            return bool(self.run.of(call.input).isfinite().all() and not self.run.of(call.output).isfinite().all())
        except NotKnown:
            return False

    # -- what is not finite ----------------------------------------------------------------------

    def _seen(self, value: int) -> _Seen | None:
        if value not in self._memo:
            self._memo[value] = None  # a loop cannot happen; a value that cannot be read counts as finite
            self._memo[value] = self._look(value)
        return self._memo[value]

    def _look(self, value: int) -> _Seen | None:
        graph = self.facts.traced.graph
        record = graph.values[value]
        tensor = self._tensor(record)
        if tensor is None or bool(tensor.isfinite().all()):
            return None
        seen = _Seen(int(tensor.isnan().sum()), int((tensor == math.inf).sum()), int((tensor == -math.inf).sum()))
        seen.declared = self._is_declared(record, seen)
        return seen

    def _tensor(self, record: Value) -> torch.Tensor | None:
        if not record.floating or "complex" in record.dtype:
            return None
        if record.kind in (ValueKind.PARAM, ValueKind.BUFFER):
            named = self.facts.tensors
            tensor = next((named[n] for n in record.names if n in named), None)
        elif record.kind is ValueKind.CONST:
            tensor = self.facts.traced.constants.get(record.id)
        else:
            tensor = self.run.of(record.id)
        plain = tensor is not None and tensor.layout is torch.strided and tensor.device.type != "meta"
        return tensor.detach() if tensor is not None and plain and not tensor.is_quantized else None

    def _is_declared(self, record: Value, seen: _Seen) -> bool:
        """Whether nobody computed it: a constant, a mask, or what these spread to without becoming NaN."""
        graph = self.facts.traced.graph
        op = graph.producer(record.id)
        if op is None:
            # an input of zeros and -inf is a mask, and so is a constant without NaN
            return seen.nan == 0 and (record.kind is not ValueKind.INPUT or seen.positive == 0)
        before = [s for i in op.inputs if (s := self._seen(i)) is not None]
        if any(not s.declared for s in before):
            return False
        if seen.nan:
            return False
        written = any(isinstance(a, float) and math.isinf(a) for a in (*op.args, *op.kwargs.values()))
        return bool(before) or written or not self.facts.traced.data[record.id] or self._adds_mask(op, seen)

    def _adds_mask(self, op: Op, seen: _Seen) -> bool:
        """Whether scores run into -inf because a mask of the lowest number was added to them."""
        if op.short not in ops.ADD | ops.SUB or seen.positive:
            return False
        for tensor in (self._tensor(self.facts.traced.graph.values[i]) for i in op.inputs):
            if tensor is not None and float(tensor.min()) <= _MASKING and len(tensor.unique()) <= _MASK_LEVELS:
                return True
        return False

    # -- the way back ------------------------------------------------------------------------------

    def _trace(self, end: int, reached: str, seen: _Seen) -> Failure:
        graph = self.facts.traced.graph
        way = [end]
        while True:
            op = graph.producer(way[-1])
            source = None if op is None else self._earlier(op)
            if source is None:
                break
            way.append(source)
        origin = self._origin(way[-1])
        first_nan = next((v for v in reversed(way) if (s := self._seen(v)) is not None and s.nan), end)
        where = graph.producer(first_nan)
        ran = set(way)
        victims = tuple(
            n for n in self.facts.norm_calls.norms if n.input in ran and n.output in ran and way[-1] != n.output
        )
        victims = tuple(n for n in victims if origin.norm is None or n.op.id != origin.norm.op.id)
        return Failure(
            origin=origin,
            surfaced=graph.path(where) if where is not None else origin.path,
            victims=victims,
            reached=reached,
            bad=seen.bad,
            bad32=self._bad32(end),
            only_negative=seen.nan == seen.positive == 0,
        )

    def _earlier(self, op: Op) -> int | None:
        """Return the first input of an op that is not finite and was not declared to be."""
        return next((i for i in op.inputs if (s := self._seen(i)) is not None and not s.declared), None)

    def _origin(self, value: int) -> Origin:
        graph = self.facts.traced.graph
        record, seen = graph.values[value], self._seen(value)
        assert seen is not None
        op = graph.producer(value)
        norm = next((n for n in self.facts.norm_calls.norms if op is not None and op.id in n.members), None)
        peak32 = self._peak32(value) if op is not None else None
        return Origin(
            value=value,
            op=op,
            path=graph.path(op) if op is not None else ", ".join(record.names) or "a constant",
            how=How.GIVEN if op is None else self._how(op, record, seen, peak32),
            dtype=record.dtype,
            bad=seen.bad,
            peak32=peak32,
            norm=norm,
        )

    def _how(self, op: Op, record: Value, seen: _Seen, peak32: float | None) -> How:
        limit = torch.finfo(getattr(torch, record.dtype)).max
        if peak32 is not None and math.isfinite(peak32) and peak32 > limit:
            return How.OVERFLOW
        given = [t for i in op.inputs if (t := self._tensor(self.facts.traced.graph.values[i])) is not None]
        masked = any(s is not None for s in (self._seen(i) for i in op.inputs))  # declared, or it would lie earlier
        if op.short in ops.SOFTMAX | ops.ATTENTION and seen.nan:
            return How.MASKED_ROW
        if masked and seen.nan:
            return How.PRODUCT if op.short in ops.MUL | ops.MATMUL | ops.LINEAR else How.DIFFERENCE
        if op.short in _LOGS | _ROOTS and seen.nan:
            return How.DOMAIN
        if op.short in _LOGS:
            return How.LOG_OF_ZERO
        if op.short in _QUOTIENTS and given and bool((given[-1] == 0).any()):
            return How.ZERO_BY_ZERO if seen.nan else How.BY_ZERO
        if not seen.nan:
            return How.OVERFLOW
        return How.DOMAIN if self._negative_variance(op) else How.UNKNOWN

    def _negative_variance(self, op: Op) -> bool:
        norm = next((n for n in self.facts.norm_calls.norms if op.id in n.members and n.running_var is not None), None)
        if norm is None or norm.running_var is None:
            return False
        variance = self._tensor(self.facts.traced.graph.values[norm.running_var])
        return variance is not None and not bool((variance >= 0).all())

    def _peak32(self, value: int) -> float | None:
        if self.facts.traced.graph.values[value].dtype not in HALF or self.float32 is None:
            return None
        try:
            tensor = self.float32.like(value)
        except NotKnown:
            tensor = self._before_cast(value)
        if tensor is None:
            return None
        return peak(tensor) if bool(tensor.isfinite().all()) else math.inf

    def _before_cast(self, value: int) -> torch.Tensor | None:
        """Return what a cast to half precision rounded: in float32 the cast does nothing and leaves no value."""
        op = self.facts.traced.graph.producer(value)
        return self.run.of(op.inputs[0]) if op is not None and op.short in ops.RECAST else None

    def _bad32(self, value: int) -> int | None:
        """Return how many elements of a value are not finite in the float32 copy."""
        graph = self.facts.traced.graph
        if not any(v.dtype in HALF for v in graph.values if v.kind is ValueKind.OP) or self.float32 is None:
            return None
        there = self.float32.graph.outputs
        try:
            if value in graph.outputs and len(there) == len(graph.outputs):
                tensor = self.float32.of(there[graph.outputs.index(value)])
            else:
                tensor = self.float32.like(value)
        except NotKnown:
            return None
        return int((~tensor.isfinite()).sum())

    # -- who made it large --------------------------------------------------------------------------

    def contributors(self, origin: Origin, most: int = 3) -> list[dict[str, object]]:
        """Return the norms before an overflow whose output holds the largest numbers, largest first.

        A norm hands on rows of size 1: anything larger is its gain. Norms below a hundredth of the limit, and those
        whose output a linear map reads (which decides the size anew), do not count.
        """
        stop = origin.op.id if origin.op is not None else 0
        found: list[tuple[float, dict[str, object]]] = []
        for site in self.facts.sites:
            calls = [c for c in site.calls if min(c.members, default=c.op.id) <= stop]
            if not calls or not any(self._joins_sum(c, origin) for c in calls):
                continue
            size = max(self._output_peak(c) for c in calls)
            gain = self._gain(site.row.weight_path, site.row.spec.weight_offset if site.row.spec else 0.0)
            if size > origin.limit / 100:
                found.append((size, {"path": site.row.path, "max_output": size, "max_gain": gain}))
        return [row for _, row in sorted(found, key=lambda item: -item[0])[:most]]

    def _joins_sum(self, call: NormCall, origin: Origin) -> bool:
        graph = self.facts.traced.graph
        if origin.norm is not None and origin.norm.op.id == call.op.id:
            return True
        readers = [o.short for o in graph.consumers(call.output)]
        return any(name in ops.ADD | ops.VIEW for name in readers)

    def _output_peak(self, call: NormCall) -> float:
        for run, get in ((self.float32, "like"), (self.run, "of")):
            try:
                if run is not None:
                    return peak(getattr(run, get)(call.output))
            except NotKnown:
                continue
        return 0.0

    def _gain(self, path: str | None, offset: float) -> float | None:
        parameter = self.facts.parameters.get(path or "")
        return (
            None
            if parameter is None or parameter.numel() == 0
            else float((parameter.detach().float() + offset).abs().max())
        )
