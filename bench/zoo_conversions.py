"""What the sweep over architectures asks of a conversion: what converts, what does not and why, and the proof.

Every gain, bias and mean is redrawn for the proof (the twin gate), in float64.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

__all__ = ["examine", "summary"]


def examine(target: Any, name: str) -> dict[str, Any]:
    """Return counts, reasons and figures of one conversion of one target."""
    from normwise import conversions
    from normwise.errors import ConversionRefused

    started = time.perf_counter()
    try:
        plan = conversions.plan(name, target)
        planned = time.perf_counter() - started
        record: dict[str, Any] = {
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
    if "fault" in record or "failed" in record:
        return "failed"
    if not record["converted"] and not record["refused"]:
        return "has none"
    if not record["converted"]:
        return "refused"
    if not record["passed"]:
        return "not proved"
    return "partly" if record["refused"] else "converted"


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
