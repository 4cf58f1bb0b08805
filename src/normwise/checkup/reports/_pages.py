"""The page of a rule, and where it stands."""

from __future__ import annotations

__all__ = ["file_of", "page_of", "title_of"]


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
