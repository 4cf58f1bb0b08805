"""The trials of a study as columns, for CSV and Parquet.

Parameters and metrics have their own names; a metric that is called like a parameter is ``metric_NAME``. What a trial
cost is ``trial_seconds``, ``trial_cpu_seconds``, ``trial_peak_bytes`` and ``trial_attempts``; its conditions are
``condition_NAME``, the hashes of what was read ``data_NAME``. A trial without a result has ``state`` "open", or
"failed" and its ``error``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from normwise.rendering.plain import plain

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = ["columns"]

_COSTS = ("seconds", "cpu_seconds", "peak_bytes", "attempts")


def columns(evidence: Evidence) -> dict[str, list[Any]]:
    """Return a list of equal length for every column; what a trial does not have is None."""
    records = list(_records(evidence))
    names = dict.fromkeys(name for group in zip(*records, strict=True) for record in group for name in record)
    flat = [{name: value for group in record for name, value in group.items()} for record in records]
    return {name: [record.get(name) for record in flat] for name in names}


def _records(evidence: Evidence) -> Iterator[tuple[dict[str, Any], ...]]:
    """Yield the groups of columns of each trial."""
    taken = {name for each in (*evidence.rows, *evidence.unrun) for name in each.params} | {"study", "version", "state"}
    study = {"study": evidence.study, "version": evidence.part.VERSION}
    data = _prefixed("data", {name.replace("-", "_"): digest for name, digest in evidence.data.items()})
    for row in evidence.rows:
        metrics = {f"metric_{name}" if name in taken else name: value for name, value in row.metrics.items()}
        costs = _prefixed("trial", {name: getattr(row, name) for name in _COSTS})
        conditions = _prefixed("condition", {name: _flat(value) for name, value in row.conditions.items()})
        yield study, dict(row.params), {"state": "done"}, metrics, costs, conditions, data, {}
    for each in evidence.unrun:
        state = {"state": "failed" if each.error else "open"}
        yield study, dict(each.params), state, {}, {"trial_attempts": each.attempts}, {}, data, {"error": each.error}


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _flat(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(plain(value))
