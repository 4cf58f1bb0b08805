"""A report made ready to be shown: sentences and rows that the text and the page share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normwise.checkup.finding import Finding, Severity
from normwise.checkup.reports._words import Words
from normwise.facts.records import Evidence, NormSite, ProfileRow, Stack, StackKind
from normwise.rendering.cleaning import clean, shorten
from normwise.rendering.collapse import Group, collapse, collapse_paths
from normwise.rendering.numbers import number, quantity
from normwise.spec import Gate, Kind, Modulation, NormSpec, Statistic, Weight

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = [
    "CURVES", "FORMULAS", "KINDS", "MARKS", "MOST_PLACES", "NormRow", "curve", "effect", "evidence", "headline",
    "inputs", "no_norms", "norm_rows", "places", "profiles", "stack_words", "unchanged", "weights",
]  # fmt: skip

KINDS = {
    StackKind.PRE: "pre-norm",
    StackKind.POST: "post-norm",
    StackKind.SANDWICH: "sandwich norm",
    StackKind.RES_POST: "res-post-norm",
    StackKind.PARALLEL: "parallel branches, a norm each",
    StackKind.PARALLEL_SHARED: "parallel branches, one shared norm",
    StackKind.NONE: "no norm around the adds",
    StackKind.MIXED: "mixed",
    StackKind.OTHER: "another form",
}
FORMULAS = {
    StackKind.PRE: "x + F(N(x))",
    StackKind.POST: "N(x + F(x))",
    StackKind.SANDWICH: "x + N(F(N(x)))",
    StackKind.RES_POST: "x + N(F(x))",
    StackKind.PARALLEL: "x + A(N(x)) + M(N'(x))",
    StackKind.PARALLEL_SHARED: "x + A(N(x)) + M(N(x))",
    StackKind.NONE: "x + F(x)",
}
MARKS = {Evidence.VERIFIED: "✓", Evidence.DERIVED: "·", Evidence.PROBED: "~", Evidence.UNKNOWN: "?"}
CURVES = {"residual": "residual_rms", "branch": "branch_rms", "gradient": "grad_rms", "predicted": "predicted_rms"}

_INPUTS = {
    "given": "given",
    "from-shape": "made from the given shape",
    "inferred": "inferred from the model",
    "none": "none, the model was not run",
}
_WEIGHTS = {
    "given": "yours",
    "real": "real",
    "random": "random (structure counts, magnitudes do not)",
    "fake": "none (structure only)",
}
_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
MOST_PLACES = 3  # of a finding that are spelled out
_LONGEST_VALUE = 160  # characters of one piece of evidence
_MOST_ITEMS = 6  # of a list in the evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRow:
    """One line of the norm map: one norm, or equal norms of repeated blocks."""

    label: str
    count: int
    kind: str
    axes: str
    eps: str
    statistics: str
    gain: str
    placement: str
    stack: str
    calls: int
    evidence: Evidence
    mark: str
    note: str
    members: tuple[NormSite, ...]


def headline(report: Report, say: Words) -> list[tuple[str, str]]:
    """Return what a reader wants first, each with its tone: error, warning, info, good or plain."""
    if not report.rules_run:
        return [(say.count(len(report.norms), "norm"), "plain"), *_cost(report, say)]
    counts = Counter(finding.severity for finding in report.findings)
    found = [(say.count(counts[severity], severity), str(severity)) for severity in Severity if counts[severity]]
    judged = [(say.count(len(report.passed), "passed"), "plain")]
    if report.not_checked:
        judged.append((say.count(len(report.not_checked), "not checked"), "plain"))
    return [*(found or [(say("no findings"), "good" if report.passed else "plain")]), *judged, *_cost(report, say)]


def _cost(report: Report, say: Words) -> list[tuple[str, str]]:
    return [(quantity(report.cost.seconds), "plain"), *([sentence] if (sentence := unchanged(report, say)) else [])]


def unchanged(report: Report, say: Words) -> tuple[str, str] | None:
    """Return whether the model is as it was found, where that was compared."""
    if report.unchanged is None:
        return None
    return (say("model unchanged"), "plain") if report.unchanged else (say("MODEL CHANGED"), "error")


def inputs(report: Report, say: Words) -> str:
    """Return the rung of the input ladder in words."""
    return say(_INPUTS[report.inputs]) if report.inputs in _INPUTS else clean(report.inputs)


def weights(report: Report, say: Words) -> str:
    """Return in words what the weights are worth."""
    return say(_WEIGHTS[report.weights]) if report.weights in _WEIGHTS else clean(report.weights)


def stack_words(stack: Stack, say: Words) -> list[str]:
    """Return a stack's kind, size and ends in words."""
    kind = say(KINDS[stack.kind])
    if stack.name:
        kind = f"{clean(stack.name)} ({kind})"
    if stack.kind is StackKind.MIXED and stack.mixture:
        kind += ": " + ", ".join(f"{clean(sort)} ×{count}" for sort, count in stack.mixture)
    parts = [kind, say.count(stack.depth, "block"), say.count(stack.sublayers, "sublayer")]
    if stack.starts_with_norm:
        parts.append(say("starts with a norm"))
    if stack.kind is StackKind.POST and not stack.final_norm:
        return [*parts, say("ends with its own norm")]
    return [*parts, f"{say('final norm')}: {say('yes' if stack.final_norm else 'no')}"]


def nothing(report: Report) -> str:
    """Return the title of an empty map: nothing found is not the same as not looked."""
    return "No normalization found" if report.inputs != "none" else "Norms not known"


def no_norms(report: Report, say: Words) -> str:
    """Return why the map is empty."""
    ran = "the model ran, and nothing in it normalizes activations"
    sentences = [ran if report.inputs != "none" else "the model was not run"]
    if report.breaks:
        sentences.append("but the dataflow was lost in places, see below")
    return ", ".join(map(say, sentences))


def norm_rows(sites: Sequence[NormSite], say: Words, *, full: bool = False) -> list[NormRow]:
    """Return the lines of the norm map; repeated blocks are one line unless ``full``."""
    if full:
        groups = [Group(label=site.path, members=(site,)) for site in sites]
    else:
        groups = collapse(sites, path=lambda site: site.path, key=_equal)
    return [_row(group, say) for group in groups]


def _equal(site: NormSite) -> tuple[object, ...]:
    return (site.spec, site.placement, site.stack, site.evidence, site.calls, site.note)


def _row(group: Group[NormSite], say: Words) -> NormRow:
    site = group.members[0]
    spec = site.spec
    return NormRow(
        label=clean(group.label),
        count=len(group.members),
        kind=_kind(spec) if spec else str(Kind.OTHER),
        axes=",".join(map(str, spec.axes)) if spec else "?",
        eps=_eps(spec, site.evidence) if spec else "?",
        statistics=_dtype(spec.stats_dtype, say) if spec else "?",
        gain=_gain(spec) if spec else "?",
        placement=str(site.placement),
        stack="" if site.stack is None else str(site.stack),
        calls=site.calls,
        evidence=site.evidence,
        mark=MARKS[site.evidence],
        note=clean(site.note or ("" if spec else say("not understood"))),
        members=group.members,
    )


def _kind(spec: NormSpec) -> str:
    parts = [str(spec.kind)]
    if spec.groups:
        parts[0] += f"({spec.groups})"
    if spec.gate is not Gate.NONE:
        parts.append("gated")
    if spec.modulation is not Modulation.NONE:
        parts.append("modulated")
    if not spec.biased:
        parts.append("n-1")
    if spec.partial < 1:
        parts.append(f"of the first {number(spec.partial)}")
    if spec.statistic is Statistic.COMPLETED:
        parts.append("of n+1")
    if spec.weight_on_input:
        parts.append("of w x")
    return " ".join(parts)


def _eps(spec: NormSpec, evidence: Evidence) -> str:
    if spec.eps is None:
        return "?" if evidence is Evidence.PROBED else "finfo"
    if spec.eps_clamp:
        return f"max {number(spec.eps)}"
    return number(spec.eps) if spec.eps_inside or not spec.eps else f"{number(spec.eps)} outside"


def _dtype(name: str | None, say: Words) -> str:
    return say("input's") if name is None else _DTYPES.get(name, name)


def _gain(spec: NormSpec) -> str:
    weight = {Weight.NONE: "", Weight.VECTOR: "w", Weight.SCALAR: "scalar"}[spec.weight]
    if weight and spec.weight_offset:
        weight = f"{number(spec.weight_offset)}+{weight}"
    return ", ".join(filter(None, [weight, "b" if spec.bias else ""])) or "-"


def profiles(report: Report) -> dict[int, list[ProfileRow]]:
    """Return the profile's rows by stack."""
    by_stack: dict[int, list[ProfileRow]] = {}
    for row in report.profile:
        by_stack.setdefault(row.stack, []).append(row)
    return by_stack


def curve(rows: Sequence[ProfileRow], name: str) -> tuple[float | None, ...]:
    """Return one of ``CURVES`` along a stack; empty where nothing of it was measured."""
    values = tuple(getattr(row, CURVES[name]) for row in rows)
    return values if any(value is not None for value in values) else ()


def places(finding: Finding, say: Words, most: int = MOST_PLACES) -> tuple[str, int]:
    """Return where a finding is, repeated blocks collapsed, and at how many places."""
    paths = tuple(dict.fromkeys(finding.paths or (finding.path,)))
    groups = collapse_paths(path or say("model") for path in paths)
    shown = ", ".join(clean(group.label) for group in groups[:most])
    left = len(groups) - most
    return (f"{shown}, +{left} {say('more')}" if left > 0 else shown), len(paths)


def evidence(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return evidence as pairs of a name and a value, both in words."""
    return [(clean(key).replace("_", " "), shorten(_value(value), _LONGEST_VALUE)) for key, value in mapping.items()]


def effect(finding: Finding, say: Words) -> str:
    """Return what the counterfactual measured: what was changed, before and after."""
    if not finding.counterfactual:
        return ""
    left = dict(finding.counterfactual)
    change, before, after = (left.pop(key, None) for key in ("change", "before", "after"))
    measured = [] if before is None and after is None else [f"{_value(before)} → {_value(after)}"]
    measured += [f"{name}: {value}" for name, value in evidence(left)]
    return ": ".join(
        filter(None, ["" if change is None else f"{say('with')} {_value(say.text(change))}", "; ".join(measured)])
    )


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(key)} {_value(inner)}" for key, inner in list(value.items())[:_MOST_ITEMS])
    if isinstance(value, (list, tuple, set, frozenset)):
        paths = all(isinstance(inner, str) for inner in value)
        items = [group.label for group in collapse_paths(value)] if paths else list(value)
        shown = [_value(item) for item in items[:_MOST_ITEMS]]
        return ", ".join([*shown, "…"] if len(items) > _MOST_ITEMS else shown)
    return clean(value)
