"""Parquet, one row a trial: the columns of the CSV file, lists as lists. Needs ``pip install 'normwise[parquet]'``."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from normwise.errors import StudyError
from normwise.rendering.plain import plain
from normwise.studies.reports._columns import columns

if TYPE_CHECKING:
    from normwise.studies._evidence import Evidence

__all__ = ["render", "require"]

SUFFIXES = (".parquet",)
BINARY = True


def render(evidence: Evidence) -> bytes:
    """Return the trials as Parquet.

    Raises:
        StudyError: pyarrow is not installed.
    """
    require()
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({name: _uniform(values) for name, values in columns(evidence).items()})
    page = io.BytesIO()
    parquet.write_table(table, page)
    return page.getvalue()


def require() -> None:
    """Do nothing where pyarrow is installed.

    Raises:
        StudyError: it is not.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise StudyError("Parquet needs pyarrow: pip install 'normwise[parquet]'") from None


def _uniform(values: list[Any]) -> list[Any]:
    """Give a column one type: whole numbers beside others become float, anything else that is mixed becomes text."""
    kinds = {kind for value in values for kind in _kinds(value)}
    if kinds <= {int} or kinds <= {float, int}:
        return [_each(value, float if float in kinds else int) for value in values]
    return values if len(kinds) == 1 else [None if value is None else str(plain(value)) for value in values]


def _kinds(value: Any) -> set[type]:
    """Return the types in a cell; a list beside a number is a mixture too."""
    if isinstance(value, (list, tuple)):
        return {kind for inner in value for kind in _kinds(inner)}
    return set() if value is None else {type(value)}


def _each(value: Any, kind: type) -> Any:
    if isinstance(value, (list, tuple)):
        return [_each(inner, kind) for inner in value]
    return None if value is None else kind(value)
