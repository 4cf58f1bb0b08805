"""The page of a rule, cut into what a report can set: headings, paragraphs and code."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["blocks", "file_of", "page_of", "title_of"]

_CHINESE = r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
_BETWEEN_CHINESE = re.compile(rf"(?<={_CHINESE}) (?={_CHINESE})")  # a line end there is no space
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def page_of(code: str, lang: str) -> str:
    """Return the page of a rule in a language, without its title; nothing for a code that this version lacks."""
    return _page(code, lang).partition("\n")[2]


def title_of(code: str, lang: str) -> str:
    """Return the title of a rule's page."""
    return _page(code, lang).partition("\n")[0]


def file_of(docs: str, lang: str) -> str:
    """Return the file of a rule's page in a language.

    Examples:
        >>> file_of("docs/rules/NUM001.md", "zh")
        'docs/rules/NUM001.zh-CN.md'
    """
    named = lang == "zh" and docs.endswith(".md")
    return f"{docs.removesuffix('.md')}.zh-CN.md" if named else docs


def _page(code: str, lang: str) -> str:
    from normwise._parts import page
    from normwise.checkup import rules

    found = {rule.CODE: rule for rule in rules.all_rules().values()}
    return page(found[code], lang) if code in found else ""


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
