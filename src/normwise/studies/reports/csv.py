"""CSV, one row a trial: parameters, metrics, cost and conditions as columns; lists as JSON.

Text that a spreadsheet would take for a formula has an apostrophe before it.
"""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

from normwise.rendering import clean, obeyed_by_none
from normwise.rendering.plain import plain
from normwise.studies.reports._columns import columns

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = ["render"]

SUFFIXES = (".csv",)
BINARY = False


def render(evidence: Evidence) -> str:
    """Return the trials as CSV; what is not there is empty, numbers that are not finite are nan, inf and -inf."""
    made = columns(evidence)
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    writer.writerow(map(_cell, made))
    writer.writerows([_cell(value) for value in row] for row in zip(*made.values(), strict=True))
    return obeyed_by_none(page.getvalue())


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return f"'{clean(value)}" if value.startswith(("=", "+", "-", "@")) else clean(value)
    return json.dumps(plain(value), allow_nan=False) if isinstance(value, (list, tuple, dict)) else value
