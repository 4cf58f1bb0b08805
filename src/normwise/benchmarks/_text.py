"""The tables of a benchmark for the terminal: one for each layer, shape and dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.text import Text

from normwise._parts import page_title
from normwise.benchmarks import _words
from normwise.benchmarks._result import OURS, Result, Row
from normwise.rendering.languages import in_language
from normwise.rendering.numbers import number, size
from normwise.rendering.tables import Column, by_terminal, draw, fitting, pairs, plain_ascii, table
from normwise.rendering.tables import text as safe

__all__ = ["figure", "heading", "render", "title_of"]

# Where the terminal is narrow, the highest number goes first.
_SPARE = {"quartiles": 4, "gb_per_s": 3, "relative": 1, "saved": 2}


def render(result: Result, *, lang: str = "en", color: bool | None = None, width: int | None = None) -> str:
    """Return the tables.

    Args:
        result: what was measured.
        lang: "en" or "zh".
        color: None: on a terminal.
        width: in columns; None: of the terminal.
    """
    width, color = by_terminal(width, color)
    page = draw(_parts(result, lang, width), width=width, color=color)
    return plain_ascii(page)


def _parts(result: Result, lang: str, width: int) -> Iterator[RenderableType]:
    yield safe(title_of(result, lang), "bold")
    for line in (
        _words.machine_line(result),
        _words.kernels_line(result.kernels),
        _words.method_line(result.method),
        _words.LEGEND,
    ):
        yield safe(in_language(line, lang), "dim")
    for rows in result.contests():
        yield Text()
        yield safe(heading(rows[0], lang), "bold")
        yield table(fitting(_columns([row for row in rows if row.ms is not None], lang), width), width)
        missing = [row for row in rows if row.why is not None]
        if missing:
            reasons = {row.rival: row.why for row in missing}
            yield pairs((safe(rival, "dim"), safe(why, "dim")) for rival, why in reasons.items())


def title_of(result: Result, lang: str) -> str:
    """Return the first line of the benchmark's page."""
    from normwise import benchmarks

    return page_title(benchmarks.find(result.benchmark), lang)


def heading(row: Row, lang: str) -> str:
    """Say what the rows of a contest share."""
    threads = f"{row.threads} 线程" if lang == "zh" else f"{row.threads} thread{'s' * (row.threads > 1)}"
    shape = f"[{', '.join(map(str, row.shape))}]"
    return " ".join(each for each in (row.layer, shape, row.dtype, row.layout, f"({threads})") if each)


def figure(value: float | None) -> str:
    """Spell a figure with three digits, or all of its whole ones.

    Examples:
        >>> figure(0.01234), figure(12.345), figure(6453.2), figure(None)
        ('0.0123', '12.3', '6453', '-')
    """
    return number(value) if value is None or value < 1000 else f"{value:.0f}"


def _columns(rows: list[Row], lang: str) -> list[Column]:
    cells: dict[str, Callable[[Row], str]] = {
        "what": lambda row: row.what,
        "rival": lambda row: row.rival,
        "ms": lambda row: figure(row.ms),
        "quartiles": lambda row: f"{figure(row.low)} - {figure(row.high)}",
        "gb_per_s": lambda row: figure(row.gb_per_s),
        "copies": lambda row: figure(row.copies),
        "relative": lambda row: figure(row.relative),
        "saved": lambda row: "" if row.saved is None else figure(row.saved),
        "peak_bytes": lambda row: "" if row.peak_bytes is None else size(row.peak_bytes),
    }
    optional = {"gb_per_s", "copies", "relative", "saved", "peak_bytes"}
    shown = [name for name in cells if name not in optional or any(getattr(row, name) is not None for row in rows)]
    return [
        Column(
            heading=in_language(_words.HEADINGS[name], lang),
            cells=tuple(safe(cells[name](row), "bold" if row.rival == OURS else "") for row in rows),
            right=name not in ("what", "rival"),
            spare=_SPARE.get(name, 0),
        )
        for name in shown
    ]
