"""Tables and consoles of rich, made so that text from a model is never read as markup."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from normwise.rendering.cleaning import clean, obeyed_by_none

__all__ = ["Column", "by_terminal", "draw", "fitting", "pairs", "plain_ascii", "table", "text", "wrap_path"]

_WIDTH = 100  # columns where there is no terminal
_WIDEST = 140  # sentences are hard to read on longer lines
_NARROWEST = 40
_INDENT, _GAP = 2, 2
_SHORTEST_PATH = 26

_ASCII = str.maketrans(
    {**dict(zip("▁▂▃▄▅▆▇█", "12345678", strict=True)), "─": "-", "━": "=", "·": "|", "×": "x", "÷": "/", "…": "~"}
    | {"✓": "v", "→": ">", "≥": ">="}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: its heading, its cells and how they are set."""

    heading: str
    cells: tuple[Text, ...]
    right: bool = False
    spare: int = 0  # where the terminal is narrow, columns with the highest number are left out first; 0: never


def text(content: object, style: str = "") -> Text:
    """Make a cleaned rich text; brackets and colons in it stay what they are."""
    return Text(clean(content), style=style)


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Leave out spare columns until the first one has room.

    Args:
        columns: the columns of a table.
        width: of the terminal, in columns.
    """
    kept = list(columns)
    for column in sorted(columns, key=lambda column: -column.spare):
        if column.spare and _room(kept, width) < min(_SHORTEST_PATH, _needed(columns[0])):
            kept.remove(column)
    return kept


def table(columns: Sequence[Column], width: int) -> RenderableType:
    """Make an indented table; the first column takes what width is left and breaks at dots.

    Args:
        columns: the columns; all with equally many cells.
        width: of the terminal, in columns.
    """
    room = max(min(_room(columns, width), _needed(columns[0])), 1)
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        justify = "right" if column.right else "left"
        made.add_column(Text(column.heading), justify=justify, width=_needed(column) if index else room, no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        made.add_row(wrap_path(cells[0], room), *cells[1:])
    return Padding(made, (0, 0, 0, _INDENT))


def pairs(rows: Iterable[tuple[Text, Text]], indent: int = _INDENT) -> RenderableType:
    """Set labels beside texts; the lines of a long text stay beside its label."""
    made = Table.grid(padding=(0, _GAP, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, content in rows:
        made.add_row(name, content)
    return Padding(made, (0, 0, 0, indent))


def wrap_path(path: Text, width: int) -> Text:
    """Break a path in front of dots so that it fits the width; continuations are indented."""
    if path.cell_len <= width:
        return path
    lines, line = [], ""
    for piece in _pieces(path.plain, max(width - _INDENT, 1)):
        if line.strip() and cell_len(line) + cell_len(piece) > width:
            lines.append(line)
            line = " " * _INDENT
        line += piece
    return Text("\n".join([*lines, line]), style=path.style)


def _pieces(path: str, longest: int) -> Iterator[str]:
    """Cut a path in front of its dots, and anywhere where that is not enough."""
    for component in path.replace(".", "\0.").split("\0"):
        while cell_len(component) > longest:
            head = set_cell_size(component, longest).rstrip(" ") or component[:1]
            yield head
            component = component[len(head) :]
        yield component


def by_terminal(width: int | None, color: bool | None) -> tuple[int, bool]:
    """Settle the width and whether to use colour from what standard output is.

    Args:
        width: columns; None: those of the terminal (or ``COLUMNS``), 100 without one.
        color: None: on a terminal, unless ``NO_COLOR`` is set.
    """
    if width is None:
        width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDEST)
    unwanted = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    colored = sys.stdout is not None and sys.stdout.isatty() and not unwanted if color is None else color
    return max(width, _NARROWEST), colored


def draw(parts: Iterable[RenderableType], *, width: int, color: bool) -> str:
    """Render parts below each other to text, without trailing blanks."""
    page = io.StringIO()
    console = Console(
        file=page,
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        no_color=not color,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
        safe_box=False,
        _environ={},
    )
    for part in parts:
        console.print(part)
    return "\n".join(obeyed_by_none(line.rstrip()) for line in page.getvalue().splitlines()) + "\n"


def plain_ascii(page: str) -> str:
    """Replace drawing characters where standard output has an encoding without them."""
    try:
        page.encode(getattr(sys.stdout, "encoding", None) or "utf-8")  # there may be no standard output
    except (UnicodeEncodeError, LookupError):
        return page.translate(_ASCII)
    return page


def _room(columns: Sequence[Column], width: int) -> int:
    return width - _INDENT - sum(_needed(column) + _GAP for column in columns[1:])


def _needed(column: Column) -> int:
    return max(Text(column.heading).cell_len, *(cell.cell_len for cell in column.cells), 1)
