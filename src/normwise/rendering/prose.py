"""Pages of parts (docstrings and their Chinese twins) cut into what a report can set: headings, paragraphs and code."""

from __future__ import annotations

import re
from collections.abc import Iterator

from markupsafe import Markup

from normwise.rendering.cleaning import clean
from normwise.rendering.svg import element

__all__ = ["blocks", "prose"]

_CHINESE = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
_BETWEEN_CHINESE = re.compile(rf"(?<={_CHINESE}) (?={_CHINESE})")  # a line end there is no space
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def prose(text: str) -> Markup:
    """Return a page as HTML: ``<p class="nw-h">`` for headings, ``<p class="nw-p">``, ``<pre>``.

    Examples:
        >>> prose("Is `a < b`.")
        Markup('<p class="nw-p">Is <code>a &lt; b</code>.</p>')
    """
    return Markup("\n").join(_set(kind, pieces) for kind, pieces in blocks(text))


def _set(kind: str, pieces: list[tuple[bool, str]]) -> Markup:
    if kind == "code":
        lines = Markup("\n").join(clean(line) for line in pieces[0][1].split("\n"))
        return element("pre", element("code", lines))
    return element("p", *(element("code", piece) if code else piece for code, piece in pieces), class_=f"nw-{kind}")


def blocks(text: str) -> Iterator[tuple[str, list[tuple[bool, str]]]]:
    """Yield the blocks of a page: "h" heading, "p" paragraph or "code", each in pieces that are code or not.

    Examples:
        >>> list(blocks("A `b`.\\n\\n## Why"))
        [('p', [(False, 'A '), (True, 'b'), (False, '.')]), ('h', [(False, 'Why')])]
    """
    for index, part in enumerate(_FENCED.split(text)):
        if index % 2:
            yield "code", [(True, part.rstrip("\n"))]
            continue
        for line in re.split(r"\n\s*\n|\n(?=## |- )", part):
            heading, _, rest = line.strip().partition("\n") if line.strip().startswith("## ") else ("", "", line)
            if heading:
                yield "h", [(False, heading[3:])]
            if rest.strip():
                yield "p", _pieces(_BETWEEN_CHINESE.sub("", " ".join(rest.split())))


def _pieces(paragraph: str) -> list[tuple[bool, str]]:
    return [(bool(i % 2), piece) for i, piece in enumerate(re.split(r"`+(.+?)`+", paragraph)) if piece]
