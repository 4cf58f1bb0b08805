"""The injectors, by what they break."""

from __future__ import annotations

from bench.faults.case import Fault
from bench.faults.injectors import arithmetic, axes, gains, loading, placements, running_statistics

__all__ = ["FAULTS"]

_PARTS = (axes, running_statistics, arithmetic, gains, placements, loading)
FAULTS: dict[str, Fault] = {fault.name: fault for part in _PARTS for fault in part.FAULTS}
