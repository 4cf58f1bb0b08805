"""A report made ready to be shown: sentences and rows that the text and the page share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normwise.checkup.finding import Finding, Severity
from normwise.checkup.reports._words import Words
from normwise.facts.records import Evidence, NormSite, ProfileRow, Stack, StackKind
from normwise.rendering.cleaning import clean, shorten
from normwise.rendering.collapse import Group, collapse, collapse_paths
from normwise.rendering.numbers import number, quantity, size
from normwise.spec import Gate, Kind, Modulation, NormSpec, Statistic, Weight

if TYPE_CHECKING:
    from normwise.checkup.report import Report

__all__ = [
    "CURVES", "FORMULAS", "KINDS", "LINEAR", "MARKS", "MOST_PLACES", "PANELS", "PREDICTED", "SPARSE", "NormRow",
    "about", "along", "cost", "curve", "effect", "evidence", "explained", "headline", "moved", "no_norms", "no_stacks",
    "norm_rows", "places", "profiles", "reasons", "stack_words", "unchanged",
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
MARKS = {
    Evidence.VERIFIED: "✓", Evidence.DERIVED: "·", Evidence.PROBED: "~", Evidence.KEYS: "#", Evidence.UNKNOWN: "?",
}  # fmt: skip
CURVES = {"residual": "residual_rms", "predicted": "predicted_rms", "branch": "branch_rms", "gradient": "grad_rms"}
# panels over depth, each with its lines: what a page draws of a profile
PANELS: dict[str, dict[str, Callable[[ProfileRow], float | None]]] = {
    "residual stream, RMS": {"residual": lambda row: row.residual_rms, "predicted": lambda row: row.predicted_rms},
    "branch / stream": {"branch": lambda row: _share(row.branch_rms, row.residual_rms)},
    "branch gain v": {"gain": lambda row: row.branch_gain},
    "block influence, 1 - cos": {
        "influence": lambda row: row.block_influence,
        "predicted": lambda row: row.predicted_influence,
    },
    "gradient, RMS": {
        "gradient": lambda row: row.grad_rms,
        "predicted": lambda row: row.predicted_grad,
        "median token": lambda row: row.grad_median,
    },
    "gradient of the query weights, RMS": {"gradient": lambda row: row.query_grad},
    "share of eps under the root": {"eps": lambda row: row.eps_share},
}
LINEAR = frozenset({"share of eps under the root"})
SPARSE = frozenset({"block influence, 1 - cos", "gradient of the query weights, RMS"})  # not at every sublayer
PREDICTED = "predicted"  # the name of the lines that theory drew

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
    if report.suppressed:
        judged.append((say.count(len(report.suppressed), "suppressed"), "plain"))
    return [*(found or [(say("no findings"), "good" if report.passed else "plain")]), *judged, *_cost(report, say)]


def _cost(report: Report, say: Words) -> list[tuple[str, str]]:
    return [(quantity(report.cost.seconds), "plain"), *([sentence] if (sentence := unchanged(report, say)) else [])]


def unchanged(report: Report, say: Words) -> tuple[str, str] | None:
    """Return whether the model is as it was found, where that was compared."""
    if report.unchanged is None:
        return None
    return (say("model unchanged"), "plain") if report.unchanged else (say("MODEL CHANGED"), "error")


def about(report: Report, say: Words) -> str:
    """Return what stood behind the check: inputs, weights, effort and the passes it took."""
    of_checkpoint = "none, a checkpoint does not run"
    known = {**_INPUTS, "none": of_checkpoint} if report.checkpoint_only else _INPUTS
    inputs = say(known[report.inputs]) if report.inputs in known else clean(report.inputs)
    weights = say(_WEIGHTS[report.weights]) if report.weights in _WEIGHTS else clean(report.weights)
    effort = f"{say('effort')} {clean(report.effort)}"
    return f"{say('inputs')} {inputs} · {say('weights')} {weights} · {effort}: {passes(report, say)}"


def passes(report: Report, say: Words) -> str:
    """Return how often the model ran, and how many of these runs were repairs."""
    spent = report.cost
    shown = [say.count(spent.forward_passes, "forward pass"), say.count(spent.backward_passes, "backward pass")]
    if spent.repair_passes:
        shown.append(say.count(spent.repair_passes, "of them for a repair"))
    return ", ".join(shown)


def cost(report: Report, say: Words) -> str:
    """Return what the check took: time, passes, memory."""
    spent = [quantity(report.cost.seconds), passes(report, say)]
    if report.cost.peak_bytes:
        spent.append(f"{say('peak memory')} {size(report.cost.peak_bytes)}")
    return ", ".join(spent)


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
    return "No normalization found" if report.inputs != "none" or report.checkpoint_only else "Norms not known"


def no_norms(report: Report, say: Words) -> str:
    """Return why the map is empty."""
    if report.checkpoint_only:
        return say("no keys of the checkpoint look like those of a norm")
    ran = report.inputs != "none"
    sentences = ["the model ran, and nothing in it normalizes activations" if ran else "the model was not run"]
    if report.breaks:
        sentences.append("but the dataflow was lost in places, see below")
    return ", ".join(map(say, sentences))


def no_stacks(report: Report) -> str:
    """Return why there is no stack to show."""
    known = not report.checkpoint_only
    return "no residual stream was found" if known else "where the norms sit is not in a checkpoint"


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
        note=clean(say.text(site.note or "") or ("" if spec else say("not understood"))),
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
        return "?" if evidence in (Evidence.PROBED, Evidence.KEYS) else "finfo"
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
    return along(rows, lambda row: getattr(row, CURVES[name]))


def along(rows: Sequence[ProfileRow], read: Callable[[ProfileRow], float | None]) -> tuple[float | None, ...]:
    """Return a measure along a stack; empty where nothing of it was measured."""
    values = tuple(map(read, rows))
    return values if any(value is not None for value in values) else ()


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None or whole == 0 else part / whole


def reasons(report: Report, say: Words) -> list[tuple[str, list[str]]]:
    """Return why rules could not judge, each reason once with the codes that gave it."""
    by_why: dict[str, list[str]] = {}
    for each in report.not_checked:
        by_why.setdefault(say.text(each.why), []).append(clean(each.code))
    return [(clean(why), codes) for why, codes in by_why.items()]


def places(finding: Finding, say: Words, most: int = MOST_PLACES) -> tuple[str, int]:
    """Return where a finding is, repeated blocks collapsed, and at how many places."""
    paths = tuple(dict.fromkeys(finding.paths or (finding.path,)))
    groups = collapse_paths(path or say("model") for path in paths)
    shown = ", ".join(clean(group.label) for group in groups[:most])
    left = len(groups) - most
    return (f"{shown}, {say.more(left)}" if left > 0 else shown), len(paths)


def evidence(mapping: Mapping[str, Any], say: Words) -> list[tuple[str, str]]:
    """Return evidence as pairs of a name and a value, both in words; a metric is the name of its value."""
    left = dict(mapping)
    pairs = []
    if isinstance(left.get("metric"), str) and "value" in left:
        named, value, floor = left.pop("metric"), _value(left.pop("value"), say), left.pop("floor", None)
        aside = "" if floor is None else f" ({say('floor')} {_value(floor, say)})"
        pairs.append((say.name(_value(named, say)), value + aside))
    pairs += [(say.name(clean(key)), _value(value, say)) for key, value in left.items()]
    return [(name, shorten(value, _LONGEST_VALUE)) for name, value in pairs]


def effect(finding: Finding, say: Words) -> str:
    """Return what the counterfactual measured: what was changed, what that moved, before and after."""
    if not finding.counterfactual:
        return ""
    left = dict(finding.counterfactual)
    change, metric, before, after = (left.pop(key, None) for key in ("change", "metric", "before", "after"))
    moved = [] if before is None and after is None else [f"{_value(before, say)} → {_value(after, say)}"]
    measured = [" ".join([say.name(_value(metric, say)), *moved])] if metric is not None else moved
    measured += [f"{name}: {value}" for name, value in evidence(left, say)]
    with_ = [] if change is None else [say.joined(say("with"), _value(change, say))]
    return ": ".join([*with_, *(["; ".join(measured)] if measured else [])])


def explained(finding: Finding, say: Words) -> str:
    """Return the command that prints the page of the rule."""
    return f"normwise explain {clean(finding.code)}" + ("" if say.lang == "en" else f" --lang {say.lang}")


def moved(finding: Finding) -> tuple[float, float] | None:
    """Return the numbers before and after a repair, where both are numbers."""
    before, after = ((finding.counterfactual or {}).get(key) for key in ("before", "after"))
    if isinstance(before, bool) or isinstance(after, bool):
        return None
    return (before, after) if isinstance(before, (int, float)) and isinstance(after, (int, float)) else None


def _value(value: Any, say: Words) -> str:
    if isinstance(value, bool) or value is None:
        return "-" if value is None else say("yes" if value else "no")
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, Mapping):
        items = list(value.items())[:_MOST_ITEMS]
        return ", ".join(f"{clean(key)} {_value(inner, say)}" for key, inner in items)
    if isinstance(value, (list, tuple, set, frozenset)):
        paths = all(isinstance(inner, str) for inner in value)
        items = [group.label for group in collapse_paths(value)] if paths else list(value)
        shown = [_value(item, say) for item in items[:_MOST_ITEMS]]
        return ", ".join([*shown, "…"] if len(items) > _MOST_ITEMS else shown)
    return clean(say.text(value)) if isinstance(value, str) else clean(value)
