"""Runs one rule on one target: findings, passed, or "not checked: why"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from normwise.checkup.finding import Finding, NotChecked, Severity
from normwise.errors import NormwiseError, NotKnown
from normwise.facts import Facts
from normwise.facts.stored import NO_FORWARD
from normwise.rendering import both

__all__ = ["DOCS", "chosen", "named", "run", "tolerances", "unknown"]

DOCS = "docs/rules/{code}.md"

# A repair that moves its number by less than this share of it has not touched the cause. Rounding moves a float32
# number by 1e-6 of itself, real causes by tens of percent (RULES 0.4 measures four orders of magnitude between them).
MOVED = 0.01


def run(name: str, rule: ModuleType, facts: Facts) -> list[Finding] | NotChecked:
    """Run one rule. A rule that fails is not checked; it never stops the others.

    Only rules that say ``READS_CHECKPOINTS`` judge a checkpoint by itself: the others would pass what they never saw.
    """
    if facts.target.stored is not None and not getattr(rule, "READS_CHECKPOINTS", False):
        return NotChecked(code=rule.CODE, name=name, why=NO_FORWARD)
    try:
        found = list(rule.check(facts))
    except NotKnown as unknown:
        return NotChecked(code=rule.CODE, name=name, why=unknown.why)
    except NormwiseError as error:
        return NotChecked(code=rule.CODE, name=name, why=both(str(error), f"未能完成：{error}"))
    except Exception as error:  # a defect in a rule must not cost the user the report
        said = f"{type(error).__name__}: {error}"
        why = both(f"the rule failed ({said}); please report it", f"规则本身出错（{said}）；请报告")
        return NotChecked(code=rule.CODE, name=name, why=why)
    docs = DOCS.format(code=rule.CODE)
    return [
        replace(f, code=rule.CODE, name=name, docs=docs, paths=f.paths or (f.path,), severity=_proved(f)) for f in found
    ]


def _proved(finding: Finding) -> Severity:
    """Demote a finding whose repair moved nothing: it blamed the wrong thing."""
    before, after = (
        (finding.counterfactual.get("before"), finding.counterfactual.get("after"))
        if finding.counterfactual
        else (None, None)
    )
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)):
        return finding.severity
    if before == after or abs(before - after) <= MOVED * max(abs(before), abs(after)):
        return Severity.INFO
    return finding.severity


def tolerances(rule: ModuleType) -> dict[str, Any]:
    """Return the numbers a rule judges by: its public constants that are numbers, in the order of the file.

    Examples:
        >>> from normwise.checkup.rules import eps_outside_root
        >>> tolerances(eps_outside_root)
        {'constants': (0.0, 0.1, 1.0, 3.7)}
    """
    named = {name: value for name, value in vars(rule).items() if name.isupper() and not name.startswith("_")}
    return {name.lower(): value for name, value in named.items() if _numeric(value)}


def _numeric(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_numeric, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


def _matching(rules: Mapping[str, ModuleType], entries: Iterable[str]) -> set[str]:
    entries = entries.split(",") if isinstance(entries, str) else entries
    return {name for entry in entries for name in named(rules, entry)}


def named(rules: Mapping[str, ModuleType], entry: str) -> set[str]:
    """Return the names of the rules that an entry stands for: a code, the first letters of codes, or a name.

    Raises:
        ValueError: it stands for none; the nearest code or name is given.
    """
    text = entry.strip()
    hits = {n for n, r in rules.items() if r.CODE.startswith(text.upper()) or n == text.lower().replace("_", "-")}
    if not text or not hits:
        raise unknown(rules, entry)
    return hits


def unknown(rules: Mapping[str, ModuleType], text: str) -> ValueError:
    """Return the error for a text that names no rule, with the nearest that does."""
    words = {word.lower(): word for name, rule in rules.items() for word in (name, rule.CODE, rule.CODE[:3])}
    near = get_close_matches(text.strip().lower().replace("_", "-"), words, n=1)
    hint = f"did you mean {words[near[0]]!r}?" if near else "give a code (PLC001), a family (PLC) or a name;"
    return ValueError(f"no rule is called {text!r}: {hint} `normwise rules` lists them")
