"""Testing: models that must stay clean, and a conformance suite for norm layers, ours or anybody's.

from normwise.testing import assert_clean, conformance

assert_clean(model, inputs)  # raises AssertionError with every finding; a fixture of pytest does the same
conformance(MyRMSNorm, NormSpec(eps=1e-6))  # raises AssertionError with every failed check

Names load when they are first used: pytest imports ``plugin`` at every start, which must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normwise.testing.clean import assert_clean
    from normwise.testing.report import Check, Conformance
    from normwise.testing.suite import CHECKS, conformance

__all__ = ["CHECKS", "Check", "Conformance", "assert_clean", "conformance"]

_HOMES = {
    "CHECKS": "suite",
    "Check": "report",
    "Conformance": "report",
    "assert_clean": "clean",
    "conformance": "suite",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'normwise.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"normwise.testing.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
