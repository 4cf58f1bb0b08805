"""What the sweep over architectures asks of a conversion: what converts, what does not and why, and the proof.

Every gain, bias and mean is redrawn for the proof (the twin gate), in float64.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

__all__ = ["examine", "page", "summary"]

_HEAD = """# {name} on every architecture of transformers

Small models with random weights, made by `hf:TYPE` from the default configuration; of the {ran} types that run, those
with a norm to convert. The error is that of the twin: every gain, bias, mean and weight redrawn, in float64, the
largest of all outputs and probes, relative to the largest entry. Written by
`python bench/zoo.py --convert {name} --page FILE` from one sweep (transformers {version}).

{counts}

| type | norms | converted | subtractions | error | what stays, and why |
|---|---|---|---|---|---|
"""


def examine(target: Any, name: str) -> dict[str, Any]:
    """Return counts, reasons and figures of one conversion of one target."""
    from normwise import conversions
    from normwise.errors import ConversionRefused

    started = time.perf_counter()
    record: dict[str, Any] = {}
    try:
        plan = conversions.plan(name, target)
        planned = time.perf_counter() - started
        record = {
            "plan_seconds": round(planned, 3),
            "converted": sum("->" in change.what for change in plan.changes),
            "subtractions": sum("->" not in change.what for change in plan.changes),
            "refused": len(plan.refused),
            "reasons": sorted({refusal.why for refusal in plan.refused}),
        }
        if not plan.changes:
            return record
        converted = conversions.convert(name, target)
    except ConversionRefused as refusal:
        return {**record, "failed": list(refusal.reasons)}
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    gates = {gate.name: {"passed": gate.passed, "why": str(gate.why)} for gate in converted.proof.gates}
    twin = converted.proof.gate("twin").figures
    return {**record, "gates": gates, "gap": twin.get("gap"), "passed": converted.proof.passed}


def _state(record: dict[str, Any]) -> str:
    if not record["ran"]:
        return "not run"
    told = record.get("fault") or "; ".join(record.get("failed", ()))
    if told:  # the first is the sweep's own limit, not an answer of the conversion
        return "out of memory" if "alloc" in told else "failed"
    if not record["converted"] and not record["refused"]:
        return "has none"
    if not record["converted"]:
        return "refused"
    if not record["passed"]:
        return "not proved"
    return "partly" if record["refused"] else "converted"


def page(name: str, done: dict[str, dict[str, Any]]) -> str:
    """Return the list of all types with a norm to convert, as Markdown."""
    import transformers

    states = {kind: _state(record) for kind, record in sorted(done.items())}
    counts = Counter(state for state in states.values() if state not in ("not run", "has none"))
    told = ", ".join(f"{state} {count}" for state, count in counts.most_common())
    ran = sum(record["ran"] for record in done.values())
    head = _HEAD.format(
        name=name, ran=ran, version=transformers.__version__, counts=f"In all {counts.total()}: {told}."
    )
    rows = [_row(kind, done[kind], state) for kind, state in states.items() if state not in ("not run", "has none")]
    return head + "\n".join(rows) + "\n"


def _row(kind: str, record: dict[str, Any], state: str) -> str:
    if state in ("failed", "out of memory"):
        why = record.get("fault") or "; ".join(record["failed"])
        return f"| `{kind}` | - | - | - | - | {state}{': ' + _plain(why) if state == 'failed' else ''} |"
    reasons = list(dict.fromkeys(map(_plain, record["reasons"])))
    more = f"; {len(reasons) - 2} more" if len(reasons) > 2 else ""
    gap = "-" if record.get("gap") is None else f"{record['gap']:.0e}"
    cells = (f"`{kind}`", record["converted"] + record["refused"], record["converted"], record["subtractions"], gap)
    return f"| {' | '.join(map(str, cells))} | {'; '.join(reasons[:2])}{more} |"


def _plain(why: str) -> str:
    """Return a reason without the numbers of blocks, so that those of all blocks are one."""
    return re.sub(r"\.\d+(?=[.,; ]|$)", ".#", why).replace("|", "\\|")


def summary(done: dict[str, dict[str, Any]]) -> str:
    """Return the counts of each outcome, and every type that is not as it should be."""
    states = Counter(_state(record) for record in done.values())
    lines = [f"{count:4}  {state}" for state, count in states.most_common()]
    gaps = [record["gap"] for record in done.values() if record.get("gap") is not None]
    if gaps:
        lines.append(f"largest gap of a randomised twin: {max(gaps):.1e}")
    for name, record in sorted(done.items()):
        if _state(record) in ("failed", "not proved"):
            why = record.get("fault") or "; ".join(record.get("failed", ())) or str(record.get("gates"))
            lines.append(f"{_state(record)}: {name}: {why[:300]}")
    return "\n".join(lines)
