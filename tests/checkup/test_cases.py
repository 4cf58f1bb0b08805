"""Public bug reports about normalization, re-created: the true cause comes first, the healthy twin is left in peace.

Each file of tests/data/cases states its source, symptom and cause.
"""

from __future__ import annotations

import pytest
from bench.faults.replays import CASES, CAUSES, checked

from normwise.checkup import Severity
from normwise.checkup.report import Report

each_case = pytest.mark.parametrize("number", CAUSES)


def test_every_case_has_its_cause_named_here() -> None:
    assert {file.name[:3] for file in CASES.glob("*.py")} == set(CAUSES)


@each_case
def test_the_true_cause_comes_first(number: str) -> None:
    report = checked(number, "faulty")
    found = [(f.code, str(f.severity), f.path, f.message) for f in report.findings]
    assert found, "nothing was found"
    assert found[0][0] in CAUSES[number].split(), found
    assert report.unchanged is True
    keeps_to_its_budget(report)


@each_case
def test_the_healthy_twin_is_left_in_peace(number: str) -> None:
    report = checked(number, "healthy")
    assert [(f.code, f.path, f.message) for f in report.findings if f.severity is not Severity.INFO] == []
    assert report.unchanged is True
    keeps_to_its_budget(report)


def keeps_to_its_budget(report: Report) -> None:
    passes = report.cost.forward_passes + report.cost.backward_passes
    assert passes <= 15 + 2 * max(len(report.findings), 1)
