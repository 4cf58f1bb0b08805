"""The page of a rule, its name and level, and where the page stands."""

from __future__ import annotations

from types import ModuleType

__all__ = ["file_of", "name_of", "page_of", "rule_of", "title_of"]


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


def name_of(code: str) -> str:
    """Return the name of a rule; nothing for a code that this version lacks."""
    return _rules().get(code, ("", None))[0]


def rule_of(code: str) -> ModuleType | None:
    """Return the module of a rule; None for a code that this version lacks."""
    return _rules().get(code, ("", None))[1]


def _page(code: str, lang: str) -> str:
    from normwise._parts import page

    rule = rule_of(code)
    return page(rule, lang) if rule else ""


def _rules() -> dict[str, tuple[str, ModuleType | None]]:
    from normwise.checkup import rules

    return {rule.CODE: (name, rule) for name, rule in rules.all_rules().items()}
