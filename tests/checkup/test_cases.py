"""Public bug reports about normalization, re-created: the true cause comes first, the healthy twin is left in peace.

Each file of tests/data/cases states its source, symptom and cause.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import normwise as nw
from normwise.checkup import Report, Severity

CASES = Path(__file__).parents[1] / "data" / "cases"

# number of the case -> codes whose page names its true cause
CAUSES = {
    "001": "BNS001",
    "003": "BNS007",
    "004": "AXS004",
    "005": "AXS004",
    "008": "AXS007",
    "010": "BNS004",
    "012": "BNS016",
    "013": "BNS011",
    "014": "NUM003",
    "015": "NUM009",
    "016": "NUM009 NUM008",
    "017": "NUM001",
    "018": "NUM005",
    "022": "NUM004",
    "024": "NUM005",
    "025": "PLC001",
    "026": "PLC004",
    "028": "PLC005",
    "029": "PLC003",
    "030": "PLC011 PAR006",
    "031": "PLC010",
    "034": "PAR001",
    "035": "PAR003",
    "036": "PAR010",
    "038": "BNS013",
    "039": "BNS009",
    "041": "BNS010",
    "043": "PAR002",
    "045": "CKP005",
    "046": "CKP002",
    "048": "CKP003",
    "049": "CKP005",
    "051": "CKP005",
    "052": "CKP006",
    "053": "CKP006",
    "055": "PAR009",
    "056": "CKP006",
    "058": "NUM012",
    "060": "AXS008",
}
each_case = pytest.mark.parametrize("number", CAUSES)


@cache
def case(number: str) -> ModuleType:
    (file,) = CASES.glob(f"{number}_*.py")
    spec = importlib.util.spec_from_file_location(f"case_{number}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(number: str, side: str) -> Report:
    evidence = dict(getattr(case(number), side)())
    return nw.check(evidence.pop("model"), evidence.pop("inputs"), **evidence)


def test_every_case_has_its_cause_named_here() -> None:
    assert {file.name[:3] for file in CASES.glob("*.py")} == set(CAUSES)


@each_case
def test_the_true_cause_comes_first(number: str) -> None:
    report = checked(number, "faulty")
    found = [(f.code, str(f.severity), f.path, f.message) for f in report.findings]
    assert found, "nothing was found"
    assert found[0][0] in CAUSES[number].split(), found
    assert report.unchanged is True


@each_case
def test_the_healthy_twin_is_left_in_peace(number: str) -> None:
    report = checked(number, "healthy")
    assert [(f.code, f.path, f.message) for f in report.findings if f.severity is not Severity.INFO] == []
    assert report.unchanged is True


@each_case
@pytest.mark.parametrize("side", ["faulty", "healthy"])
def test_a_check_keeps_to_its_budget(number: str, side: str) -> None:
    report = checked(number, side)
    passes = report.cost.forward_passes + report.cost.backward_passes
    assert passes <= 15 + 2 * max(len(report.findings), 1)
