"""Testing: models that must stay clean, and a conformance suite for norm layers, ours or anybody's.

from normwise.testing import assert_clean, conformance

assert_clean(model, inputs)  # raises AssertionError with every finding; a fixture of pytest does the same
conformance(MyRMSNorm, NormSpec(eps=1e-6))  # raises AssertionError with every failed check

Names load when they are first used: pytest imports ``plugin`` at every start, which must not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normwise._parts import lazy

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
__getattr__, __dir__ = lazy(globals(), _HOMES)
