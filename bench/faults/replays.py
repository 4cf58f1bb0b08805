"""The replayed public bug reports of tests/data/cases as trials: the cause comes first, the healthy twin is silent."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.faults import baselines
from bench.faults.case import Case
from normwise.checkup import Report, Severity
from normwise.facts.records import Placement

__all__ = ["CASES", "CAUSES", "NAMES", "checked", "run"]

CASES = Path(__file__).parents[2] / "tests" / "data" / "cases"
# number of the case -> codes whose page names its true cause
CAUSES: dict[str, str] = json.loads((CASES.parent / "case_causes.json").read_text(encoding="utf-8"))
NAMES = tuple(f"case:{number}" for number in CAUSES)


@cache
def _case(number: str) -> ModuleType:
    (file,) = CASES.glob(f"{number}_*.py")
    spec = importlib.util.spec_from_file_location(f"case_{number}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(number: str, side: str) -> Report:
    """Return the report on one side of a case, "faulty" or "healthy"."""
    import normwise as nw

    evidence = dict(getattr(_case(number), side)())
    return nw.check(evidence.pop("model"), evidence.pop("inputs"), **evidence)


def run(name: str) -> dict[str, Any]:
    """Return the record of a replay: its code, whether the cause comes first, and what the healthy twin is told."""
    number = name.removeprefix("case:")
    codes = CAUSES[number].split()
    faulty, healthy = checked(number, "faulty"), checked(number, "healthy")
    loud = [f for f in healthy.findings if f.severity is not Severity.INFO]
    return {
        "status": "replayed",
        "code": codes[0],
        "found": any(f.code in codes for f in faulty.findings),
        "first": bool(faulty.findings) and faulty.findings[0].code in codes,
        "seconds": round(faulty.cost.seconds, 2),
        "others": [[f.code, str(f.severity), f.path] for f in loud],
        "detector": baselines.overflow_detector(_as_case(name), ()),
        "anomaly": baselines.anomaly_mode(_as_case(name), ()),
    }


def _as_case(name: str) -> Case:
    from normwise.targets.inputs import map_tensors

    made = dict(_case(name.removeprefix("case:")).faulty())
    inputs = made["inputs"]
    args, kwargs = (
        ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    )
    return Case(name, made["model"], map_tensors(tuple(args), lambda t: t), dict(kwargs), (), Placement())
