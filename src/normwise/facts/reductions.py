"""What sums, means, variances, vector norms and maxima do to homogeneous terms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from normwise.facts.flow import Flow
from normwise.facts.terms import Term, Terms
from normwise.graph import Op, Ref

__all__ = ["Reductions"]


class Reductions:
    """The reducing half of the interpreter; ``terms`` holds the terms of the values seen so far."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.graph = flow, flow.graph
        self.terms: dict[int, Terms] = {}

    def of(self, value: int) -> Terms:
        """Return the terms of a value; one that no op made is its own root."""
        if value not in self.terms:
            record = self.graph.values[value]
            if (
                record.producer < 0
                and record.floating
                and (self.flow.act[value] or self.flow.learned[value])
                and record.numel > 1
            ):
                self.terms[value] = {value: Term(ndim=len(record.shape))}
        return self.terms.get(value, {})

    def mean(self, op: Op) -> list[Terms]:
        """The mean over some axes."""
        return self._reduce(op, self._axes(op, 1), average=True)

    def sum(self, op: Op) -> list[Terms]:
        """The sum over some axes: the mean times the count."""
        return self._reduce(op, self._axes(op, 1), average=False)

    def _axes(self, op: Op, position: int) -> tuple[int, ...]:
        ndim = len(self.graph.values[op.inputs[0]].shape)
        if ndim == 0:
            return ()  # torch takes dim 0 and -1 of a number
        dims = op.args[position] if len(op.args) > position else op.kwargs.get("dim")
        if isinstance(dims, bool) or dims is None or dims == () or isinstance(dims, Ref):
            return tuple(range(-ndim, 0))
        dims = dims if isinstance(dims, (tuple, list)) else (dims,)
        return tuple(sorted(d - ndim if d >= 0 else d for d in dims if isinstance(d, int)))

    def _reduce(self, op: Op, axes: tuple[int, ...], *, average: bool) -> list[Terms]:
        source = op.inputs[0]
        record = self.graph.values[source]
        count = 1
        for axis in axes:
            count *= record.shape[axis] if -axis <= len(record.shape) else 1
        out = {}
        for root, t in self.of(source).items():
            if t.log or t.deferred:
                continue
            reduced = (
                self._first_reduction(t, axes, count, record, source) if not t.reduced else self._again(t, axes, count)
            )
            if reduced is None:
                continue
            if not average and reduced.coef is not None:
                reduced = replace(reduced, coef=reduced.coef * count)
            out[root] = reduced
        return [out]

    def _first_reduction(self, t: Term, axes: tuple[int, ...], count: int, record: Any, source: int) -> Term | None:
        if not axes:
            return None
        if t.order == 2:
            stat = "variance" if t.centered else "mean_square"
        elif t.order == 1:
            stat = "l1" if t.absolute else "mean"
        else:
            return None
        return replace(
            t,
            axes=axes,
            ndim=len(record.shape),
            second=t.order == 2,
            stat=stat,
            count=count,
            stat_value=source,
            absolute=False,
        )

    @staticmethod
    def _again(t: Term, axes: tuple[int, ...], count: int) -> Term | None:
        merged = tuple(sorted(set(t.axes) | set(axes)))
        return replace(t, axes=merged, count=t.count * max(count, 1)) if t.deg == 2 or not t.second else None

    def spread(self, op: Op) -> list[Terms]:
        """var, std, var_mean, std_mean."""
        source = op.inputs[0]
        axes, correction = self._axes(op, 1), self._correction(op)
        record = self.graph.values[source]
        count = 1
        for axis in axes:
            count *= record.shape[axis]
        root_taken = op.short.startswith("std")
        spread, mean = {}, {}
        for root, t in self.of(source).items():
            if t.reduced or t.log or t.order != 1 or t.deferred or not axes:
                continue
            common = replace(t, axes=axes, ndim=len(record.shape), count=count, stat_value=source)
            spread[root] = replace(
                common,
                deg=t.deg * (1 if root_taken else 2),
                second=True,
                stat="variance",
                centered=True,
                biased=correction == 0,
            )
            mean[root] = replace(common, stat="mean")
        return [spread, mean] if op.short.endswith("_mean") else [spread]

    @staticmethod
    def _correction(op: Op) -> float:
        if "correction" in op.kwargs:
            given = op.kwargs["correction"]
            return 1.0 if given is None else float(given)
        flags = [a for a in op.args[1:] if isinstance(a, bool)]
        if "unbiased" in op.kwargs:
            return 1.0 if op.kwargs["unbiased"] else 0.0
        return 0.0 if flags and not flags[0] else 1.0

    def vector_norm(self, op: Op) -> list[Terms]:
        """The 2-norm is a second moment; the 1-norm and the maximum are not."""
        order = op.args[1] if len(op.args) > 1 else op.kwargs.get("ord", op.kwargs.get("p", 2))
        order = 2 if order in (None, "fro") else order
        dims_at = 2 if op.short in ("linalg_vector_norm", "norm", "linalg_norm") else 1
        axes = self._axes(op, dims_at)
        record = self.graph.values[op.inputs[0]]
        count = 1
        for axis in axes:
            count *= record.shape[axis]
        out = {}
        for root, t in self.of(op.inputs[0]).items():
            if t.reduced or t.log or t.order != 1 or t.deferred or not axes or not isinstance(order, (int, float)):
                continue
            common = replace(t, axes=axes, ndim=len(record.shape), count=count, stat_value=op.inputs[0])
            if order == 2:
                coef = None if t.coef is None else t.coef * count**0.5
                stat = "variance" if t.centered else "mean_square"
                out[root] = replace(common, second=True, stat=stat, coef=coef)
            else:
                out[root] = replace(common, stat="l1" if order == 1 else "amax", coef=None)
        return [out]

    def reduce_extreme(self, op: Op) -> list[Terms]:
        """max or min over some axes."""
        axes = self._axes(op, 1)
        out = {
            root: replace(t, axes=axes, ndim=len(self.graph.values[op.inputs[0]].shape), stat="amax", coef=None)
            for root, t in self.of(op.inputs[0]).items()
            if not t.log and not t.reduced
        }
        return [out]
