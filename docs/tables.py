"""Tables of Markdown that the scripts of this folder measure and write between two marks of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["table", "write_table"]


def table(header: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the names in the header are joined by commas."""
    names = header.split(", ")
    lines = [f"| {' | '.join(cells)} |" for cells in (names, *rows)]
    return "\n".join([lines[0], "|---" * len(names) + "|", *lines[1:]])


def write_table(page: Path, mark: str, header: str, rows: Sequence[Sequence[str]]) -> None:
    """Make the table of a page anew that stands between ``<!-- mark -->`` and ``<!-- /mark -->``."""
    before, start, rest = page.read_text("utf-8").partition(f"<!-- {mark} -->\n")
    _, end, rest = rest.partition(f"<!-- /{mark} -->")
    if not (start and end):
        raise ValueError(f"{page} has no table marked {mark!r}")
    page.write_text(f"{before}{start}{table(header, rows)}\n{end}{rest}", "utf-8")
