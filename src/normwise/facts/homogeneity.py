"""Finds hand-written norms by algebra: each value's degree as a homogeneous function of a nearby root.

Scale a root x by c > 0: x scales by c, x^2 by c^2, mean(x^2) by c^2 with fewer elements, its rsqrt
by 1/c. A norm is any product or quotient of a full-size value of degree d with a reduced value
of degree -d (or d, in a quotient) *of the same root* whose statistic is a second moment. One
rule covers LayerNorm, RMSNorm, L2, standard deviations, sums over a constant, powers, exp-log
and in-place chains, however they are written; replay then proves or refutes what was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from normwise.facts import vocabulary as ops
from normwise.facts.candidate import Candidate, best
from normwise.facts.flow import Flow
from normwise.facts.reductions import Reductions
from normwise.facts.terms import Term, Terms, added, combined, moved, raised
from normwise.graph import ALIAS, Op, Ref

__all__ = ["candidates"]

# roots followed per value: the statistics of every norm seen in practice are at most eight values away
_ROOTS = 12


def candidates(flow: Flow, *, skip: frozenset[int] = frozenset()) -> list[Candidate]:
    """Return the candidates of a graph in program order.

    Args:
        flow: the graph with its taints.
        skip: ops that are norms by themselves; their outputs start afresh.
    """
    return _Interpreter(flow, skip).run()


class _Interpreter(Reductions):
    def __init__(self, flow: Flow, skip: frozenset[int]) -> None:
        super().__init__(flow)
        self.skip = skip
        self.found: list[Candidate] = []

    def run(self) -> list[Candidate]:
        for op in self.graph.ops:
            if not op.outputs:
                continue
            results = [] if op.id in self.skip else self._interpret(op)
            for index, out in enumerate(op.outputs):
                terms = results[index] if index < len(results) else {}
                self._keep(out, {r: replace(t, members=t.members | {op.id}) for r, t in terms.items()})
        return self.found

    def _keep(self, value: int, terms: Terms) -> None:
        record = self.graph.values[value]
        # one learned number (a learned eps) is a constant, not a root
        if record.floating and (self.flow.act[value] or (self.flow.learned[value] and record.numel > 1)):
            terms[value] = Term(ndim=len(record.shape))
        if len(terms) > _ROOTS:
            terms = {r: terms[r] for r in sorted(terms)[-_ROOTS:]}
        if terms:
            self.terms[value] = terms

    def _interpret(self, op: Op) -> list[Terms]:
        handler = _HANDLERS.get(op.short)
        if op.name == ALIAS:  # an old value joined with what was written over it: the newest write stands
            return []
        return handler(self, op) if handler else []

    # -- unary ------------------------------------------------------------------------------

    def passing(self, op: Op) -> list[Terms]:
        """Casts, views and other ops that keep the degree."""
        first = op.inputs[:1] if op.short.endswith("_as") else op.inputs
        sources = [i for i in first if self.of(i)]
        if len(sources) != 1:
            return []
        record = self.graph.values[sources[0]]
        out = []
        for value in op.outputs:
            partial = self.graph.values[value].numel < record.numel
            out.append({r: moved(t, partial) for r, t in self.of(sources[0]).items()})
        return out

    def power(self, exponent: float) -> Callable[[Op], list[Terms]]:
        """Return the handler of a fixed power."""

        def apply(op: Op) -> list[Terms]:
            terms = {r: raised(t, exponent) for r, t in self.of(op.inputs[0]).items()}
            return [{r: t for r, t in terms.items() if t is not None}]

        return apply

    def pow(self, op: Op) -> list[Terms]:
        """x ** p with a constant p."""
        base, exponent = op.args[0], self.number(op.args[1])
        return [] if exponent is None or not isinstance(base, Ref) else self.power(exponent)(op)

    def absolute(self, op: Op) -> list[Terms]:
        """|x|, remembered for the sum of absolute values."""
        return [{r: replace(t, absolute=True) for r, t in self.of(op.inputs[0]).items() if not t.log}]

    # log and exp: exp(-0.5 * log(ms + eps)) is a reciprocal root

    def logarithm(self, op: Op) -> list[Terms]:
        """log of a reduced value."""
        return [{r: replace(t, log=True) for r, t in self.of(op.inputs[0]).items() if t.reduced and not t.log}]

    def exponential(self, op: Op) -> list[Terms]:
        """exp of a logarithm."""
        return [{r: replace(t, log=False, coef=None) for r, t in self.of(op.inputs[0]).items() if t.log}]

    def clamp(self, op: Op) -> list[Terms]:
        """A lower bound on a statistic is an eps."""
        low = op.args[1] if len(op.args) > 1 else op.kwargs.get("min")
        bound = self.number(low)
        if low is None:
            return [{r: t for r, t in self.of(op.inputs[0]).items() if t.reduced}] if op.short == "clamp" else []
        return [self._guarded(op, self.of(op.inputs[0]), bound, clamp=True, known=bound is not None)]

    def maximum(self, op: Op) -> list[Terms]:
        """max(statistic, constant) is an eps; max(x, axis) reduces."""
        if len(op.inputs) < 2:
            return self.reduce_extreme(op) if op.short in ("max", "min") else []
        a, b = op.inputs[:2]
        if self.of(a) and self.of(b) and self.flow.act[b]:
            return []
        value, bound = (a, b) if self.of(a) and not self.flow.act[b] else (b, a)
        return [self._guarded(op, self.of(value), self.graph.values[bound].scalar, clamp=True, known=True)]

    def where(self, op: Op) -> list[Terms]:
        """A choice between a term and a constant."""
        sources = [i for i in op.inputs if self.of(i)]
        if len(sources) != 1:
            return []
        return [dict(self.of(sources[0]))]

    def _guarded(self, op: Op, terms: Terms, eps: float | None, *, clamp: bool, known: bool) -> Terms:
        out = {}
        for root, t in terms.items():
            if not t.reduced or t.log:
                continue
            if clamp and t.second and eps is not None and eps <= 0:
                out[root] = t  # a moment is no less anyway, up to rounding
                continue
            place = {2.0: "inside", 1.0: "outside"}.get(t.deg)
            if place is None or t.eps_at or not t.second:
                out[root] = replace(t, eps_known=t.eps_known and not t.second)
                continue
            # stated for the mean-based statistic: (sum + eps) / n guards the mean with eps / n
            scaled = None if eps is None or t.coef is None or not t.coef else eps / t.coef
            out[root] = replace(
                t,
                eps=scaled,
                eps_at=("clamp_" if clamp else "") + place,
                eps_known=known and scaled is not None,
                eps_value=op.outputs[0],
            )
        return out

    # -- two operands -------------------------------------------------------------------------

    def number(self, argument: Any) -> float | None:
        """Return a Python number, or the number in a one-element tensor that does not depend on the data."""
        if isinstance(argument, Ref):
            return self.graph.values[argument.value].scalar
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            return float(argument)
        return None

    def product(self, op: Op) -> list[Terms]:
        """a * b."""
        return self._combine(op, op.args[0], op.args[1], +1.0)

    def quotient(self, op: Op) -> list[Terms]:
        """a / b."""
        if op.kwargs.get("rounding_mode") is not None:
            return []
        return self._combine(op, op.args[0], op.args[1], -1.0)

    def _combine(self, op: Op, a: Any, b: Any, sign: float) -> list[Terms]:
        ta, tb = self._terms_of(a), self._terms_of(b)
        shared = [r for r in ta if r in tb]
        if shared:
            return [self._product_of(op, ta, tb, shared, sign)]
        if ta and not self._is_act(b):
            return [self._scaled(ta, b, sign)]
        if tb and not self._is_act(a):
            powered = {r: raised(t, sign) for r, t in tb.items()}
            return [self._scaled({r: t for r, t in powered.items() if t is not None}, a, +1.0)]
        return []

    def _terms_of(self, argument: Any) -> Terms:
        return self.of(argument.value) if isinstance(argument, Ref) else {}

    def _is_act(self, argument: Any) -> bool:
        return isinstance(argument, Ref) and self.flow.act[argument.value]

    def _scaled(self, terms: Terms, by: Any, sign: float) -> Terms:
        number = self.number(by)
        learned = isinstance(by, Ref) and self.flow.learned[by.value]
        out = {}
        for root, t in terms.items():
            if t.log:
                if number is not None and sign > 0:
                    out[root] = replace(t, deg=t.deg * number, coef=None)
            elif number is not None and not learned:
                factor = number if sign > 0 else (1 / number if number else None)
                out[root] = replace(t, coef=None if t.coef is None or factor is None else t.coef * factor)
            elif learned and isinstance(by, Ref):
                out[root] = replace(t, scaled_by=(*t.scaled_by, by.value))
            elif sign < 0 and t.reduced and isinstance(by, Ref) and self.flow.data[by.value]:
                # a sum over what a mask leaves, by how much that is: replay decides whether it is the count
                out[root] = replace(t, coef=None if t.coef is None else t.coef / t.count)
            else:  # a mask or another constant
                constant = isinstance(by, Ref) and self.graph.values[by.value].numel == 1
                out[root] = replace(t, coef=None if constant else t.coef)
        return out

    def _product_of(self, op: Op, ta: Terms, tb: Terms, shared: list[int], sign: float) -> Terms:
        out: Terms = {}
        hits: list[Candidate] = []
        for root in shared:
            a, b = ta[root], tb[root]
            if a.log or b.log:
                continue
            deg = a.deg + sign * b.deg
            if a.reduced == b.reduced:
                joined = combined(a, b, deg, sign)
                if joined is not None:
                    out[root] = joined
                continue
            full, stat = (a, b) if b.reduced else (b, a)
            if sign < 0 and full is b:
                continue
            if abs(deg) < 1e-9 and full.deg != 0:
                exponent = sign if stat is b else 1.0
                settled = raised(stat, exponent)
                if settled is not None:
                    hits.append(Candidate(op=op, root=root, numerator=full, statistic=settled, core=op.outputs[0]))
            members = full.members | stat.members
            out[root] = replace(full, deg=deg, members=members, coef=None)
        chosen = best([hit for hit in hits if not self._is_centred_for_others(hit)])
        if chosen is not None:
            self.found.append(chosen)
            if chosen.statistic.second:
                return {}
        return out

    def _is_centred_for_others(self, hit: Candidate) -> bool:
        """Whether a mean was subtracted in another module, and what was left is read by more than this norm.

        It is a stream that was centred then, and the norm takes it as it is: an RMSNorm.
        """
        if not hit.numerator.centered:
            return False
        size = self.graph.values[hit.root].numel
        before = (op for op in map(self.graph.ops.__getitem__, hit.numerator.members) if op.call != hit.op.call)
        made = (out for op in before for out in op.outputs if self.graph.values[out].numel == size)
        readers = (reader for out in made for reader in self.graph.consumers(out))
        return any(reader.id not in hit.members and reader.call != hit.op.call for reader in readers)

    def plus(self, op: Op) -> list[Terms]:
        """a + b."""
        return self._sum_of(op, +1.0)

    def minus(self, op: Op) -> list[Terms]:
        """a - b."""
        return self._sum_of(op, -1.0)

    def _sum_of(self, op: Op, sign: float) -> list[Terms]:
        a, b, *_ = op.args
        if op.short == "rsub":
            a, b = b, a
        alpha = self.number(op.kwargs.get("alpha", 1))
        if alpha not in (1.0, None) and not isinstance(b, Ref):
            b = None if self.number(b) is None else self.number(b) * alpha  # type: ignore[operator]
        ta, tb = self._terms_of(a), self._terms_of(b)
        if ta and tb:
            merged = {r: added(ta[r], tb[r], sign) for r in ta if r in tb}
            return [{r: t for r, t in merged.items() if t is not None}]
        terms, other = (ta, b) if ta else (tb, a)
        if not terms or self._is_act(other):
            return []
        number = self.number(other)
        if number == 0.0:
            return [terms]
        if sign < 0 and terms is ta and number is not None:
            number = -number
        scalar = not isinstance(other, Ref) or self.graph.values[other.value].numel == 1
        if any(t.log for t in terms.values()):
            return [{r: t for r, t in terms.items() if t.log}]
        return [self._guarded(op, terms, number, clamp=False, known=number is not None)] if scalar else []

    def linear(self, op: Op) -> list[Terms]:
        """A bias-free linear map keeps the degree."""
        _, weight, *rest = op.args
        bias = rest[0] if rest else op.kwargs.get("bias")
        if bias is not None or not self.of(op.inputs[0]) or self._is_act(weight):
            return []
        return [
            {
                r: replace(t, deferred=True, coef=None)
                for r, t in self.of(op.inputs[0]).items()
                if not t.reduced and not t.log
            }
        ]

    def contraction(self, op: Op) -> list[Terms]:
        """A value contracted with itself to one number a row: the sum of its squares."""
        tensors = op.inputs
        if len(tensors) != 2:
            return []
        a, b = (self.of(i) for i in tensors)
        shape = self.graph.values[tensors[0]].shape
        out_numel = self.graph.values[op.outputs[0]].numel
        shared = [r for r in a if r in b and not a[r].reduced and not b[r].reduced and not a[r].log]
        numel = self.graph.values[tensors[0]].numel
        if (
            not shared
            or out_numel == 0
            or numel % out_numel
            or numel // out_numel != max(shape, default=0)
            or numel == out_numel
        ):
            return []
        count = numel // out_numel
        out = {}
        for root in shared:
            order = a[root].order + b[root].order
            if order == 2:
                stat = "variance" if a[root].centered else "mean_square"
                out[root] = replace(
                    a[root],
                    deg=a[root].deg + b[root].deg,
                    order=2,
                    axes=(-1,),
                    ndim=len(self.graph.values[root].shape),
                    second=True,
                    stat=stat,
                    coef=float(count),
                    count=count,
                    stat_value=root,
                    members=a[root].members | b[root].members,
                )
        return [out]


def _handlers() -> dict[str, Callable[[_Interpreter, Op], list[Terms]]]:
    table: dict[str, Callable[[_Interpreter, Op], list[Terms]]] = {}
    keep = ops.VIEW | ops.DROPOUT | {"neg", "negative", "relu", "nan_to_num", "masked_fill", "copy", "cat"}
    table.update(dict.fromkeys(keep, _Interpreter.passing))
    table.update({"where": _Interpreter.where, "abs": _Interpreter.absolute, "absolute": _Interpreter.absolute})
    for name, exponent in {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}.items():
        table[name] = lambda self, op, exponent=exponent: self.power(exponent)(op)
    table.update(
        {
            "pow": _Interpreter.pow,
            "float_power": _Interpreter.pow,
            "log": _Interpreter.logarithm,
            "exp": _Interpreter.exponential,
        }
    )
    table.update(dict.fromkeys(("clamp", "clamp_min", "clip"), _Interpreter.clamp))
    table.update(dict.fromkeys(("maximum", "fmax", "max"), _Interpreter.maximum))
    table.update(dict.fromkeys(("amax", "amin", "min"), _Interpreter.reduce_extreme))
    table.update({"mean": _Interpreter.mean, "sum": _Interpreter.sum})
    table.update(dict.fromkeys(("var", "std", "var_mean", "std_mean"), _Interpreter.spread))
    table.update(
        dict.fromkeys(("linalg_vector_norm", "norm", "linalg_norm", "frobenius_norm"), _Interpreter.vector_norm)
    )
    table.update(dict.fromkeys(ops.MUL, _Interpreter.product))
    table.update(dict.fromkeys(ops.DIV, _Interpreter.quotient))
    table.update(
        {
            "add": _Interpreter.plus,
            "sub": _Interpreter.minus,
            "subtract": _Interpreter.minus,
            "rsub": _Interpreter.minus,
        }
    )
    table.update(dict.fromkeys(ops.CONV | {"linear"}, _Interpreter.linear))
    table.update(dict.fromkeys(ops.MATMUL, _Interpreter.contraction))
    return table


_HANDLERS = _handlers()
