"""The structure gate: the converted model is mapped anew and compared with the map of the original."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from normwise.conversions._edits import Remove, SwapNorm
from normwise.conversions._plan import Plan
from normwise.conversions._specs import without_mean
from normwise.conversions.proof.subject import NOT_EXACT, Gate, Subject
from normwise.errors import NormwiseError
from normwise.facts import vocabulary as ops
from normwise.facts.facts import Facts
from normwise.facts.records import NormSite
from normwise.rendering import both
from normwise.spec import NormSpec

__all__ = ["structure"]

# not the factor, in which a norm in loose arithmetic takes in what its reader multiplies by: the twin compares it
_NEVER_CHANGED = ("eps", "eps_inside", "eps_clamp", "axes", "groups", "biased", "partial")
# of a norm that the plan does not name: all but what is read from the casts and products around it
_OWN = tuple({f.name for f in dataclasses.fields(NormSpec)} - {"cast", "stats_dtype", "out_dtype", "form", "factor"})
_FREE = ops.VIEW | ops.ADD | ops.SUB | ops.MUL | ops.DIV | {"mean"}  # what centring, folding and padding may add


def structure(subject: Subject) -> Gate:
    """Map the converted model anew: its norms and its ops are the original's, but for what the plan names."""
    if not subject.plan.exact:
        return Gate("structure", None, {}, NOT_EXACT)
    target = dataclasses.replace(subject.target, model=subject.converted, optimizer=None)
    try:
        after = Facts(target, effort="full")
        sites = {site.row.path: site.row for site in after.sites}
    except NormwiseError as error:
        return Gate(
            "structure", False, {}, both(f"the converted model does not run: {error}", f"转换后的模型无法运行：{error}")
        )
    changed = _Changed(subject.plan)
    faults = [*_norm_faults(subject.norms, sites, changed), *_op_faults(subject.facts, after, changed)]
    shapes = [[(g.values[v].shape, g.values[v].dtype) for v in g.outputs] for g in (subject.facts.graph, after.graph)]
    if shapes[0] != shapes[1]:
        faults.append(both("the outputs have other shapes or dtypes", "输出的形状或 dtype 不同"))
    norms = len(subject.norms)
    figures = {"norms": norms, "converted": sum(map(changed.site, subject.norms)), "faults": len(faults)}
    why = "; ".join(faults[:3]) or both(
        "eps, axes and dtypes of every norm are kept", "每个归一化的 eps、轴和 dtype 均保持"
    )
    return Gate("structure", not faults, figures, why)


class _Changed:
    """Which norms a plan names."""

    def __init__(self, plan: Plan) -> None:
        self.swapped = {edit.path: edit for edit in plan.edits if isinstance(edit, SwapNorm)}
        self.gone = {edit.path for edit in plan.edits if isinstance(edit, Remove)}
        self._edited = {edit.path for edit in plan.edits if not isinstance(edit, SwapNorm)}
        self._named = {change.path for change in plan.changes}

    def site(self, norm: NormSite) -> bool:
        return self._below(norm.path, self.swapped.keys() | self._edited | self._named)

    def expected(self, norm: NormSite) -> NormSite:
        """Return a norm as it must be found: in the layout of its module, and without the mean if the plan says so."""
        edit, spec = self.swapped.get(norm.path), norm.spec
        if edit is None or spec is None:
            return norm
        if spec.center and not edit.spec["center"]:
            spec = without_mean(spec, norm.shape[spec.axes[0]])
        return dataclasses.replace(norm, spec=dataclasses.replace(spec, axes=tuple(edit.spec["axes"])))

    def removed(self, norm: NormSite) -> bool:
        return self._below(norm.path, self._edited)

    @staticmethod
    def _below(path: str, paths: set[str]) -> bool:
        path = path.partition("#")[0]
        return any(path == p or path.startswith(f"{p}.") for p in paths)


def _norm_faults(before: tuple[NormSite, ...], after: Mapping[str, NormSite], changed: _Changed) -> Iterator[str]:
    for old in before:
        new = after.get(old.path)
        if new is None:
            if not changed.removed(old):
                yield both(f"{old.path}: no norm any more", f"{old.path}：不再是归一化")
        else:
            yield from _differences(changed.expected(old), new, named=changed.site(old))
    known = {old.path for old in before}
    for path, new in after.items():
        if path not in known and not changed.site(new):
            yield both(f"{path}: a norm that was not there", f"{path}：原先没有的归一化")


def _differences(old: NormSite, new: NormSite, *, named: bool) -> Iterator[str]:
    """Say in what a norm differs, which the plan names or does not."""
    if old.calls != new.calls:
        yield both(
            f"{old.path}: {old.calls} calls became {new.calls}", f"{old.path}：{old.calls} 次调用变为 {new.calls}"
        )
    if old.spec is None or new.spec is None:
        if old.spec is not new.spec:
            yield both(
                f"{old.path}: its form is not understood in both models", f"{old.path}：形式未在两个模型中都得到理解"
            )
        return
    for name in _NEVER_CHANGED if named else _OWN:
        one, other = getattr(old.spec, name), getattr(new.spec, name)
        if one != other:
            yield f"{old.path}: {name} {one} -> {other}"
    one, other = (site.spec.stats_dtype or site.dtype for site in (old, new) if site.spec)
    if named and one != other:
        yield f"{old.path}: stats_dtype {one} -> {other}"


def _op_faults(before: Facts, after: Facts, changed: _Changed) -> Iterator[str]:
    one, other = (
        _ops_outside_norms(before, changed.swapped.keys() | changed.gone),
        _ops_outside_norms(after, {*changed.swapped}),
    )
    for name in sorted(one.keys() | other.keys()):
        if one[name] != other[name]:
            yield both(f"{one[name]} x {name} became {other[name]}", f"{name} 由 {one[name]} 次变为 {other[name]} 次")


def _ops_outside_norms(facts: Facts, norms: set[str]) -> Counter[str]:
    """Count the ops that a conversion must leave alone; how a layer that is swapped or goes computes is its affair."""
    graph = facts.graph
    inside = {member for norm in facts.norm_calls.norms for member in norm.members}
    inside |= {op.id for op in graph.ops if graph.calls[op.call].path in norms}
    return Counter(op.short for op in graph.ops if op.id not in inside and op.short not in _FREE)
