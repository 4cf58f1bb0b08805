"""Findings that are kept quiet, because somebody said why; and what was said and kept nothing quiet.

A suppression is for rules and for modules: what a rule finds at such a module or below it does not count. A finding
over several places keeps those that are not covered. ``nw.ignore`` marks modules, ``[tool.normwise]`` and baselines
make suppressions of their own; all meet here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn

from normwise.checkup import rule
from normwise.checkup.finding import Finding, Suppressed, Unused
from normwise.checkup.report import Report

__all__ = ["Suppression", "at_or_below", "codes", "ignore", "marked", "quieted"]

Module = TypeVar("Module", bound=nn.Module)

# In the module's own ``__dict__``, as plain strings: copies and pickles keep it, and pickles open without normwise.
_MARK = "_normwise_ignored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suppression:
    """One rule, or one family of them, kept quiet at some modules."""

    code: str  # as it was written: a code, a family or a name
    codes: frozenset[str]  # of the rules it stands for
    pattern: str  # of module paths
    by: str
    where: str
    reason: str
    covers: Callable[[Finding, str], bool]  # a finding of one of these codes, at one of its paths


def ignore(module: Module, rules: str | Iterable[str], reason: str) -> Module:
    """Keep findings at a module, and at every module inside it, out of the verdict of a check.

    They are listed as suppressed, with the reason. The module computes and saves what it did before: no parameter,
    buffer, hook or key of its state dict is added. Copies and pickles of it are marked as well. Marking it again for
    the same rule replaces the reason.

    Args:
        module: a module of the model.
        rules: codes, families or names: "AXS004", "NUM,AXS004" or a list.
        reason: why what they find is right here.

    Returns:
        The module: ``self.norm = nw.ignore(nn.LayerNorm(64), "NUM005", "the input is scaled on purpose")``.

    Raises:
        TypeError: what is given is no module.
        ValueError: an unknown rule, no rule, or no reason.

    Examples:
        >>> import torch
        >>> norm = ignore(torch.nn.LayerNorm(8), "PAR001", "decayed on purpose: the gains are tied to the head")
        >>> list(norm.state_dict())
        ['weight', 'bias']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"what is ignored is a torch.nn.Module of the model, got a {type(module).__name__}")
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError('give a reason, it is shown beside what is kept quiet: nw.ignore(module, "AXS004", "why")')
    entries = [entry.strip() for entry in (rules.split(",") if isinstance(rules, str) else rules)]
    if not entries:
        raise ValueError('give the rules to keep quiet: nw.ignore(module, "AXS004", "why")')
    for entry in entries:
        codes(entry)
    marks = dict(vars(module).get(_MARK, ())) | dict.fromkeys(entries, reason.strip())
    vars(module)[_MARK] = tuple(marks.items())
    return module


def marked(model: nn.Module) -> list[Suppression]:
    """Return what ``ignore`` has marked in a model; a module that is shared has several paths."""
    paths: dict[nn.Module, list[str]] = {module: [] for module in model.modules() if _MARK in vars(module)}
    for path, module in model.named_modules(remove_duplicate=False) if paths else ():
        if module in paths:
            paths[module].append(path)
    return [
        Suppression(
            code=code,
            codes=codes(code),
            pattern=places[0],
            by="ignore",
            where=places[0],
            reason=reason,
            covers=lambda finding, place, places=places: any(at_or_below(place, each) for each in places),
        )
        for module, places in paths.items()
        for code, reason in vars(module)[_MARK]
    ]


def codes(entry: str) -> frozenset[str]:
    """Return the codes of the rules that a code, a family or a name stands for.

    Raises:
        ValueError: it stands for none.
    """
    from normwise.checkup import rules  # the rules are many: loaded where one is named

    known = rules.all_rules()
    return frozenset(known[name].CODE for name in rule.named(known, entry))


def at_or_below(place: str, module: str) -> bool:
    """Return whether a place of a finding is a module, is inside it, or is one of the norms that it computes.

    Examples:
        >>> at_or_below("h.1.norm", "h.1"), at_or_below("h.10.norm", "h.1"), at_or_below("h.1#2", "h.1")
        (True, False, True)
    """
    return not module or place == module or place.startswith((f"{module}.", f"{module}#"))


def quieted(report: Report, suppressions: Sequence[Suppression]) -> Report:
    """Return a report whose suppressed findings are set apart, and which names the suppressions that were not needed.

    A suppression was not needed if it covered nothing although every rule it stands for judged the target. Of several
    that cover a place the first is named, all count as needed. Fingerprints stay those of the findings as they were
    made, so that what is ignored changes no baseline.

    Args:
        report: of a check; one that was quieted before may be quieted further.
        suppressions: of this target, those that go first before others.
    """
    by_code: dict[str, list[int]] = defaultdict(list)
    for index, each in enumerate(suppressions):
        for code in each.codes:
            by_code[code].append(index)
    needed: set[int] = set()
    findings: list[Finding] = []
    quiet: list[Suppressed] = []
    for finding in report.findings:
        places: dict[int | None, list[str]] = defaultdict(list)
        for place in finding.paths or (finding.path,):
            covering = [index for index in by_code[finding.code] if suppressions[index].covers(finding, place)]
            needed.update(covering)
            places[covering[0] if covering else None].append(place)
        for index, some in places.items():
            part = _at(finding, tuple(some))
            if index is None:
                findings.append(part)
            else:
                said = suppressions[index]
                quiet.append(Suppressed(finding=part, by=said.by, where=said.where, reason=said.reason))
    judged = {*report.passed, *(f.code for f in report.findings), *(s.finding.code for s in report.suppressed)}
    unused = [
        Unused(code=each.code, pattern=each.pattern, by=each.by, where=each.where, reason=each.reason)
        for index, each in enumerate(suppressions)
        if index not in needed and each.codes <= judged
    ]
    return replace(
        report,
        findings=tuple(findings),
        suppressed=(*report.suppressed, *quiet),
        unused=(*report.unused, *unused),
    )


def _at(finding: Finding, places: tuple[str, ...]) -> Finding:
    """Return a finding at some of its places."""
    if places == (finding.paths or (finding.path,)):
        return finding
    kept = any(at_or_below(place, finding.path) for place in places)
    return replace(
        finding,
        path=finding.path if kept else places[0],
        paths=places,
        origin=finding.path if finding.origin is None else finding.origin,
    )
