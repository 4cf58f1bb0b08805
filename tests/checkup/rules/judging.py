"""Runs one rule on one model."""

from __future__ import annotations

from typing import Any

from torch import nn

import normwise as nw
from normwise.checkup import Finding


def findings(code: str, model: nn.Module, *inputs: Any, **evidence: Any) -> list[Finding]:
    """Return what a rule finds; a rule that could not judge fails the test."""
    report = nw.check(model, inputs, select=[code], **evidence)
    assert [n.why for n in report.not_checked] == []
    return list(report.findings)


def severities(code: str, model: nn.Module, *inputs: Any, **evidence: Any) -> list[str]:
    """Return the severities of what a rule finds."""
    return [str(f.severity) for f in findings(code, model, *inputs, **evidence)]


def why_not(code: str, model: nn.Module, *inputs: Any, **evidence: Any) -> str:
    """Return why a rule could not judge."""
    report = nw.check(model, inputs, select=[code], **evidence)
    (unjudged,) = report.not_checked
    return unjudged.why
