"""Draw the pictures of the README: the real report of a real check, as a terminal shows it.

``python docs/make_images.py`` writes ``docs/images/check-demo.svg``. The same report gives the same file:
the time the check took is set to a round figure and the font is the reader's own.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

import normwise as nw
from normwise.checkup import reports
from normwise.checkup.report import Report

IMAGES = Path(__file__).parent / "images"
TARGET, SELECT = "demo:faulty-decoder", ("AXS", "PLC")
COMMAND = f"normwise check {TARGET} --select {','.join(SELECT)}"
WIDTH = 100  # columns
SECONDS = 0.1  # the time shown: the real one differs from run to run

# rich's picture names two fonts on the network; a picture in a README must not ask for anything
_FONT_FACE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
_FONT_NAME = re.compile(r"Fira Code, monospace")
_FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def demo_report() -> Report:
    """Return the report of the faulty demo by the rules the picture shows."""
    report = nw.check(TARGET, select=SELECT)
    return replace(report, cost=replace(report.cost, seconds=SECONDS))


def picture(report: Report, title: str) -> str:
    """Return a report as the SVG picture of a terminal, with nothing to load."""
    console = Console(width=WIDTH, file=io.StringIO(), record=True, force_terminal=True, legacy_windows=False)
    console.print(Text.from_ansi(reports.render(report, "text", color=True, width=WIDTH)), end="")
    svg = console.export_svg(title=title, theme=MONOKAI, unique_id="normwise")
    svg = _FONT_NAME.sub(_FONTS, _FONT_FACE.sub("", svg))
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    """Write the pictures."""
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / "check-demo.svg"
    path.write_text(picture(demo_report(), f"$ {COMMAND}"), encoding="utf-8", newline="\n")
    print(f"wrote {path.relative_to(IMAGES.parent.parent)}")


if __name__ == "__main__":
    main()
