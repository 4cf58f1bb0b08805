"""Markdown of text that others control: it is shown as it is, whatever markup it holds.

Every character that CommonMark, the tables, strikethroughs and links of GitHub's dialect, or GitHub itself (mentions,
references to issues, emoji, formulas) could act on becomes a character reference, which is never markup
(https://spec.commonmark.org/0.31.2/#entity-and-numeric-character-references).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from normwise.rendering.cleaning import clean

__all__ = ["code", "prose", "table"]

_ACTIVE = re.compile(
    r"[\\`*\[\]<>&|~$]"
    r"|_(?!(?<=[^\W_]_)[^\W_])"  # inside a word it is a letter
    r"|@(?=\w)|#(?=[\w#])"  # @team, #12, ##[command]
    r"|:(?=//|[\w+-]+:)"  # a scheme, :smile:
    r"|(?<=\bwww)\."
    r"|^[-+](?=\s|$)|^[-=](?=[-=]*$)|^#(?=#*(?:\s|$))",  # a list, an underline, a heading
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")  # would start a list


def prose(text: object) -> str:
    """Return a text for a paragraph, a list item or a cell of a table.

    Examples:
        >>> prose("the norm of <b> in layers.0.q_proj is *off*")
        'the norm of &#60;b&#62; in layers.0.q_proj is &#42;off&#42;'
    """
    line = _ACTIVE.sub(lambda found: _reference(found[0]), clean(text).strip())
    return _NUMBERED.sub(lambda found: found[1] + _reference(found[2]), line)


def code(text: object) -> str:
    """Return a name set as code, for a paragraph, a list item or a cell of a table.

    Examples:
        >>> code("layers.{0-3}.norm")
        '`layers.{0-3}.norm`'
        >>> code("a|b")
        '<code>a&#124;b</code>'
    """
    name = clean(text)
    if not name.strip():
        return ""
    # not every reader takes a bar in a code span of a table; blanks at the ends of a span are cut off; and a span would
    # show a runner that the page is printed to "##[command]" as it is
    plain = not re.search(r"[`|\\]|##", name) and name == name.strip()
    return f"`{name}`" if plain else f"<code>{prose(name)}</code>"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already; columns that are empty in every row are left out."""
    filled = list(rows)
    shown = [column for column in range(len(heading)) if any(row[column] for row in filled)]
    lines = [[heading[column] for column in shown], ["---" for _ in shown]]
    lines += [[row[column] for column in shown] for row in filled]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _reference(character: str) -> str:
    return f"&#{ord(character)};"
