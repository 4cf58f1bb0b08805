"""Prose of docstrings as Markdown: code in single backticks, names of layers linked, single stars escaped."""

from __future__ import annotations

import re

from normwise import functional, layers

__all__ = ["cell", "code", "markdown"]


def markdown(text: str) -> str:
    """Return prose of a docstring for a page: code in single backticks, names linked, single stars escaped."""
    pieces = re.split(r"``(.+?)``", text)
    star = re.compile(r"(?<!\*)\*(?!\*)")
    return "".join(code(piece) if i % 2 else star.sub(r"\*", piece) for i, piece in enumerate(pieces))


def code(name: str) -> str:
    """Return a name as code, with a link where this page has a section for it."""
    homes = (("", layers), ("functional", functional))
    anchors = [f"#{home}{name.lower()}" for home, module in homes if name in module.__all__]
    return f"[`{name}`]({anchors[0]})" if anchors else f"`{name}`"


def cell(text: str) -> str:
    """Return prose for a cell of a table."""
    return markdown(" ".join(text.split())).replace("|", r"\|")
