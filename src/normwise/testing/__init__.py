"""Testing: a conformance suite for norm layers, ours or anybody's.

from normwise.testing import conformance

conformance(MyRMSNorm, NormSpec(eps=1e-6))  # raises AssertionError with every failed check
"""

from __future__ import annotations

from normwise.testing.conformance import CHECKS as CHECKS
from normwise.testing.conformance import conformance as conformance
from normwise.testing.report import Check as Check
from normwise.testing.report import Conformance as Conformance

__all__ = ["CHECKS", "Check", "Conformance", "conformance"]
