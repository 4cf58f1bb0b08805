"""What a conformance run measured, check by check."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Check", "Conformance", "Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure, what it may be at most, and what it is about."""

    value: float
    limit: float
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a layer.

    Args:
        name: what was checked.
        passed: whether ``measured`` is within ``limit``; True where the check does not apply.
        measured: the figure; NaN where there is none.
        limit: what it may be at most.
        note: what the figure is, the error raised, or why the check does not apply.
        applies: whether the layer has what is checked.
    """

    name: str
    passed: bool
    measured: float
    limit: float
    note: str = ""
    applies: bool = True

    def __str__(self) -> str:
        """Return one line."""
        state = "-" if not self.applies else "ok" if self.passed else "FAILED"
        figure = "" if math.isnan(self.measured) and self.passed else f"{self.measured:.3g} <= {self.limit:.3g}"
        figure = figure if self.passed else figure.replace("<=", "> limit")
        return f"{state:<7}{self.name:<62}{figure:<26}{self.note}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """All checks of one layer; ``str()`` prints them as a table.

    Args:
        layer: the class of the layer.
        checks: in the order of ``normwise.testing.CHECKS``.
    """

    layer: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """Return the checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    def __str__(self) -> str:
        """Return the table."""
        applied = sum(check.applies for check in self.checks)
        passed = sum(check.applies and check.passed for check in self.checks)
        return "\n".join([f"{self.layer}: {passed} of {applied} checks passed", *map(str, self.checks)])
