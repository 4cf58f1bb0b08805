"""Runs one rule on one target: findings, passed, or "not checked: why"."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType

from normwise.checkup.finding import Finding, NotChecked
from normwise.errors import NormwiseError, NotKnown
from normwise.facts import Facts

__all__ = ["DOCS", "chosen", "run"]

DOCS = "docs/rules/{code}.md"


def run(name: str, rule: ModuleType, facts: Facts) -> list[Finding] | NotChecked:
    """Run one rule. A rule that fails is not checked; it never stops the others."""
    try:
        found = list(rule.check(facts))
    except NotKnown as unknown:
        return NotChecked(code=rule.CODE, name=name, why=unknown.why)
    except NormwiseError as error:
        return NotChecked(code=rule.CODE, name=name, why=str(error))
    except Exception as error:  # a defect in a rule must not cost the user the report
        return NotChecked(
            code=rule.CODE, name=name, why=f"the rule failed ({type(error).__name__}: {error}); please report it"
        )
    docs = DOCS.format(code=rule.CODE)
    return [replace(f, code=rule.CODE, name=name, docs=docs, paths=f.paths or (f.path,)) for f in found]


def chosen(
    rules: dict[str, ModuleType], select: Iterable[str] | None, ignore: Iterable[str] | None
) -> dict[str, ModuleType]:
    """Return the rules that a selection leaves: codes, code prefixes (``BNS``) or names.

    Raises:
        ValueError: an entry matches no rule.
    """
    wanted = _matching(rules, select) if select else set(rules)
    unwanted = _matching(rules, ignore) if ignore else set()
    return {name: rule for name, rule in rules.items() if name in wanted and name not in unwanted}


def _matching(rules: dict[str, ModuleType], entries: Iterable[str]) -> set[str]:
    entries = entries.split(",") if isinstance(entries, str) else entries
    matched: set[str] = set()
    for entry in entries:
        text = entry.strip()
        hits = {n for n, r in rules.items() if r.CODE.startswith(text.upper()) or n == text.lower().replace("_", "-")}
        if not text or not hits:
            raise ValueError(
                f"no rule is called {entry!r}: give a code (PLC001), a family (PLC) or a name; "
                "`normwise rules` lists them"
            )
        matched |= hits
    return matched
