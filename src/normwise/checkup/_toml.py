"""Where in a TOML text a key or a value stands: ``tomllib`` does not say."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator

__all__ = ["Lines", "deepest_key", "statements"]

# Each alternative takes what it began, also where the end is missing: the scan is linear in any text.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"{3,5}|\Z)'
    r"|'''.*?(?:'{3,5}|\Z)"
    r'|"(?:\\.|[^"\\\n])*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*"
    r"|[\[\]{}\n.,=]",
    re.DOTALL,
)


def statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the headers and assignments of a valid TOML text, each with the number of its first line."""
    start, depth = 0, 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        depth += (mark in ("[", "{")) - (mark in ("]", "}"))
        if mark == "\n" and depth == 0:
            yield from _statement(text, start, token.end())
            start = token.end()
    yield from _statement(text, start, len(text))


def _statement(text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
    content = text[start:end].strip()
    if content and not content.startswith("#"):
        blank = len(text[start:end]) - len(text[start:end].lstrip())
        yield text.count("\n", 0, start + blank) + 1, content


def deepest_key(text: str) -> int:
    """Return the most dots between two other marks of a TOML text: the depth of its longest dotted key, about.

    ``tomllib`` takes time that grows with the square of it.
    """
    deepest = run = 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark == ".":
            run += 1
            deepest = max(deepest, run)
        elif mark[0] not in "\"'#":
            run = 0
    return deepest


class Lines:
    """The lines of a valid TOML text, by key.

    Args:
        text: what ``tomllib`` has read.

    Examples:
        >>> lines = Lines("[a]\\nb = 1\\n\\n[[a.c]]\\n[[a.c]]\\nd = [\\n  'x',\\n  'y',\\n]")
        >>> lines.of("a", "b"), lines.of("a", "c", 1, "d"), lines.of("a", "c", 1, "d", value="y")
        (2, 6, 8)
    """

    def __init__(self, text: str) -> None:
        self._found: dict[tuple[str | int, ...], tuple[int, str]] = {(): (1, "")}
        tables: Counter[tuple[str, ...]] = Counter()
        header: tuple[str | int, ...] = ()
        for line, content in statements(text):
            if content.startswith("["):
                keys = _keys(content)
                header = (*keys, tables[keys]) if content.startswith("[[") else keys
                tables[keys] += 1
                path = header
            else:
                path = (*header, *_keys(_before_equals(content) + "= 0"))
            self._found.setdefault(path, (line, content))

    def of(self, *keys: str | int, value: object = None) -> int:
        """Return the line where a key is assigned, or of the innermost table or value that would hold it.

        Args:
            keys: from the outermost table inwards; an integer counts the tables of an array.
            value: of an array that is spread over lines: the line of this one.
        """
        known = next(keys[:length] for length in range(len(keys), -1, -1) if keys[:length] in self._found)
        line, content = self._found[known]
        quoted = (f'"{value}"', f"'{value}'")
        return line + next((n for n, row in enumerate(content.split("\n")) if any(q in row for q in quoted)), 0)


def _before_equals(statement: str) -> str:
    return next(statement[: token.start()] for token in _TOKEN.finditer(statement) if token.group() == "=")


def _keys(statement: str) -> tuple[str, ...]:
    """Return the keys of a header, or of an assignment of a number."""
    keys: list[str] = []
    inner: object = tomllib.loads(statement)
    while isinstance(inner, dict) and inner:
        ((key, inner),) = inner.items()
        keys.append(key)
    return tuple(keys)
