"""The order of findings: severity, basis, cause before symptom; and what one finding says about another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType

from normwise.checkup.finding import Finding

__all__ = ["ranked"]


def ranked(findings: Iterable[Finding], rules: Mapping[str, ModuleType]) -> tuple[Finding, ...]:
    """Return findings in the order to read them.

    A rule names in ``EXPLAINS`` the codes of findings that are symptoms of its own: within one severity and basis
    those come after it. A difference from a reference (CKP006) that another finding above info explains is left out.

    Args:
        findings: of one target, in any order.
        rules: by name; where ``EXPLAINS`` is looked up.
    """
    found = list(findings)
    explained = _explained(found, {rule.CODE: rule for rule in rules.values()})
    kept = [f for f in found if f.code != _DIFFERENCE or f.code not in explained]
    return tuple(sorted(kept, key=lambda f: (f.severity.rank, f.basis.rank, f.code in explained, f.code, f.path)))


_DIFFERENCE = "CKP006"


def _explained(findings: Iterable[Finding], rules: Mapping[str, ModuleType]) -> set[str]:
    symptoms: set[str] = set()
    for finding in findings:
        rule = rules.get(finding.code)
        if finding.severity.rank < _INFO and rule is not None:
            symptoms.update(getattr(rule, "EXPLAINS", ()))
    return symptoms


_INFO = 2  # rank of Severity.INFO: what is only worth knowing explains nothing
