"""One thing found by one rule: what, where, how sure, the evidence, and the fix."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["FAIL_ON", "Basis", "Finding", "NotChecked", "Severity", "Suppressed", "Unused"]

FAIL_ON = ("error", "warning", "info", "never")


class Severity(StrEnum):
    """How much a finding matters, most severe first."""

    ERROR = "error"  # wrong result now
    WARNING = "warning"  # will hurt
    INFO = "info"  # worth knowing

    @property
    def rank(self) -> int:
        """Return 0 for the most severe."""
        return list(Severity).index(self)

    def reaches(self, fail_on: str) -> bool:
        """Return whether this severity is at or above a threshold, one of ``FAIL_ON``."""
        return fail_on != "never" and self.rank <= Severity(fail_on).rank


class Basis(StrEnum):
    """How a finding is known, strongest first."""

    PROOF = "proof"
    MEASURED = "measured"
    PATTERN = "pattern"

    @property
    def rank(self) -> int:
        """Return 0 for the strongest."""
        return list(Basis).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule's statement about one cause, wherever it shows.

    Rules fill the upper half; ``code``, ``name``, ``docs`` and ``fingerprint`` are set
    when the rule is run.
    """

    message: str
    fix: str
    path: str = ""  # the first place
    evidence: Mapping[str, Any] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    severity: Severity = Severity.WARNING
    basis: Basis = Basis.PATTERN
    counterfactual: Mapping[str, Any] | None = None
    code: str = ""
    name: str = ""
    docs: str = ""
    origin: str | None = None  # the first place that the rule gave, where some of its places are kept quiet

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path or next(iter(self.paths), ""))

    @property
    def fingerprint(self) -> str:
        """Return a stable identity: code and path with the layer numbers collapsed."""
        role = re.sub(r"\d+", "*", self.path if self.origin is None else self.origin)
        return hashlib.sha256(f"{self.code}\0{role}".encode(errors="backslashreplace")).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotChecked:
    """A rule that could not judge this target, and why."""

    code: str
    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppressed:
    """A finding that was made and does not count, because somebody said so."""

    finding: Finding
    by: str  # "configuration", "ignore" or "baseline"
    where: str  # FILE:LINE of the configuration, path of the module, file of the baseline
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """A suppression that met no finding although its rule judged the target."""

    code: str
    pattern: str  # of module paths
    by: str
    where: str
    reason: str
