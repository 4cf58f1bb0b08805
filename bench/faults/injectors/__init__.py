"""The injectors, by what they break."""

from __future__ import annotations

from bench.faults.case import Fault
from bench.faults.injectors import arithmetic, axes, gains, placements, running_statistics

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for part in (axes, running_statistics, arithmetic, gains, placements)
    for fault in part.FAULTS
}
