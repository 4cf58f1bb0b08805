"""Every rule is held to the same bar: it fires where it should, stays silent where it should, and explains itself."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

import normwise as nw
from normwise._parts import page_title
from normwise.checkup import Finding, Report, Severity, rules
from normwise.checkup.reports._evidence import EVIDENCE_ZH
from normwise.rendering import Text, in_language
from normwise.targets import Target

RULES = rules.all_rules()
DOCS = Path(__file__).parents[2] / "docs" / "rules"
SECTIONS = ("## What it finds", "## Why it matters", "## How to fix it", "## Sources")
SECTIONS_ZH = ("## 发现什么", "## 为什么重要", "## 如何修复", "## 来源")
LONGEST_MESSAGE = 100  # characters: one line of a terminal beside code and path
CHINESE = re.compile(r"[\u4e00-\u9fff]")
# by code, prefix (family): RULES speak of axes, batch-norm state, numerics, parameters, placement, ...
FAMILIES = ("AXS", "BNS", "NUM", "PAR", "PLC", "CKP", "DYN", "DST")
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@cache
def report(name: str, side: str) -> Report:
    """Every rule run on the bad or the good target of one."""
    return nw.check(getattr(RULES[name], side)())


def findings(name: str) -> list[Finding]:
    """All that any rule says of both targets of one."""
    return [f for side in ("bad", "good") for f in report(name, side).findings]


def own(report: Report, rule: ModuleType) -> list[Finding]:
    return [f for f in report.findings if f.code == rule.CODE]


def name_of(rule: ModuleType) -> str:
    return next(name for name, other in RULES.items() if other is rule)


def test_there_are_rules() -> None:
    assert len(RULES) >= 11


def test_codes_are_a_family_and_three_digits_and_never_used_twice() -> None:
    codes = [rule.CODE for rule in RULES.values()]
    assert len(set(codes)) == len(codes)
    assert [c for c in codes if not re.fullmatch(rf"({'|'.join(FAMILIES)})\d{{3}}", c)] == []


@each_rule
def test_what_a_rule_explains_are_findings_of_other_rules(rule: ModuleType) -> None:
    explained = set(getattr(rule, "EXPLAINS", ()))
    assert explained <= {other.CODE for other in RULES.values()} - {rule.CODE}


# -- bad and good targets --------------------------------------------------------------------------


@each_rule
def test_a_rule_fires_on_its_bad_target(rule: ModuleType) -> None:
    found = own(report(name_of(rule), "bad"), rule)
    assert found
    assert min(f.severity.rank for f in found) <= rule.SEVERITY.rank


@each_rule
def test_a_bad_target_has_no_other_fault_that_would_hide_its_own(rule: ModuleType) -> None:
    worst = {f.code for f in report(name_of(rule), "bad").findings if f.severity is not Severity.INFO}
    assert worst <= {rule.CODE}
    assert worst or rule.SEVERITY is Severity.INFO


@each_rule
def test_no_rule_at_all_reports_more_than_info_on_a_good_target(rule: ModuleType) -> None:
    found = report(name_of(rule), "good").findings
    assert [(f.code, f.message) for f in found if f.severity is not Severity.INFO] == []


@each_rule
def test_a_good_target_is_judged_and_passes(rule: ModuleType) -> None:
    assert rule.CODE in report(name_of(rule), "good").passed


@each_rule
def test_rules_leave_their_targets_as_they_found_them(rule: ModuleType) -> None:
    assert report(name_of(rule), "bad").unchanged is True
    assert report(name_of(rule), "good").unchanged is True


@each_rule
def test_a_rule_without_inputs_says_what_it_needs_or_judges_what_the_model_holds(rule: ModuleType) -> None:
    bad = rule.bad()
    blind = Target(model=bad.model, optimizer=bad.optimizer, inputs_from=nw.targets.InputsFrom.NONE)
    judged = nw.check(blind, select=[rule.CODE])
    said = [n.why for n in judged.not_checked]
    assert own(judged, rule) or any("needs" in why for why in said)


# -- what a finding says ----------------------------------------------------------------------------


@each_rule
def test_messages_fit_a_line_and_leave_the_code_to_the_report(rule: ModuleType) -> None:
    for f in findings(name_of(rule)):
        assert 0 < len(f.message) <= LONGEST_MESSAGE
        assert not re.search(r"[A-Z]{3}\d{3}", f.message)
        assert not f.message.endswith(".")


@each_rule
def test_fixes_are_one_sentence_or_a_snippet(rule: ModuleType) -> None:
    assert [f.fix for f in findings(name_of(rule)) if not 10 < len(f.fix) < 160] == []


@each_rule
def test_what_a_finding_says_it_says_in_two_languages(rule: ModuleType) -> None:
    found = findings(name_of(rule))
    changes = [f.counterfactual["change"] for f in found if f.counterfactual and "change" in f.counterfactual]
    assert [said for f in found for said in (f.message, f.fix) if not bilingual(said)] == []
    assert [said for said in changes if not bilingual(said)] == []


@each_rule
def test_the_names_of_evidence_have_their_chinese(rule: ModuleType) -> None:
    said = [{**f.evidence, **(f.counterfactual or {})} for f in own(report(name_of(rule), "bad"), rule)]
    names = {key for each in said for key in each} - {"change", "before", "after"}
    metrics = {str(each["metric"]) for each in said if "metric" in each}
    assert (names | metrics) - set(EVIDENCE_ZH) == set(), "add it to normwise/checkup/reports/_evidence.py"


@cache
def reports_that_know_little() -> tuple[Report, ...]:
    """Of targets without evidence: no inputs, no residual stream, no norm."""
    norm = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    blind = Target(model=norm, inputs_from=nw.targets.InputsFrom.NONE)
    return nw.check(blind), nw.check(norm, torch.randn(2, 4)), nw.check(torch.nn.Linear(4, 4), torch.randn(2, 4))


@each_rule
def test_why_a_rule_cannot_judge_is_said_in_two_languages(rule: ModuleType) -> None:
    said = [n.why for known in reports_that_know_little() for n in known.not_checked if n.code == rule.CODE]
    assert [why for why in said if not bilingual(why)] == []


def bilingual(said: str) -> bool:
    return isinstance(said, Text) and CHINESE.search(in_language(said, "zh")) is not None and not CHINESE.search(said)


def test_a_sentence_of_one_language_is_not_taken_for_two() -> None:
    assert bilingual(Text("2 gains", "2 个增益"))
    assert not bilingual("2 gains")
    assert not bilingual(Text("2 gains"))
    assert not bilingual(Text("2 个增益", "2 个增益"))


@each_rule
def test_evidence_is_plain_json_without_nan_or_infinity(rule: ModuleType) -> None:
    for f in findings(name_of(rule)):
        assert f.evidence
        json.dumps(dict(f.evidence), allow_nan=False)
        json.dumps(dict(f.counterfactual or {}), allow_nan=False)


@each_rule
def test_evidence_holds_a_number(rule: ModuleType) -> None:
    for f in findings(name_of(rule)):
        assert any(isinstance(v, (int, float)) and not isinstance(v, bool) for v in f.evidence.values()), f.code


@each_rule
def test_paths_begin_with_the_path_and_are_those_of_modules(rule: ModuleType) -> None:
    modules = {path for path, _ in rule.bad().model.named_modules()}
    for f in own(report(name_of(rule), "bad"), rule):
        assert f.path == f.paths[0]
        assert {path.split("#")[0] for path in f.paths} <= modules


# -- pages -----------------------------------------------------------------------------------------


@each_rule
def test_a_page_has_a_title_and_all_its_sections_in_order(rule: ModuleType) -> None:
    page = rule.__doc__ or ""
    assert re.fullmatch(r"[A-Z].*\.", page_title(rule))
    assert headings(page) == list(SECTIONS)
    assert all(body.strip() for body in re.split(r"^## .*$", page, flags=re.MULTILINE))


@each_rule
def test_the_chinese_page_has_a_title_and_all_its_sections_in_order(rule: ModuleType) -> None:
    title = page_title(rule, "zh")
    assert CHINESE.search(title)
    assert title.endswith("。")
    assert headings(rule.ZH) == list(SECTIONS_ZH)
    assert all(CHINESE.search(body) for body in re.split(r"^## .*$", rule.ZH, flags=re.MULTILINE)[:-1])


@each_rule
def test_the_chinese_page_names_the_same_sources_and_shows_the_same_code(rule: ModuleType) -> None:
    english, chinese = rule.__doc__ or "", rule.ZH
    assert addresses(chinese) == addresses(english)
    assert questions(chinese.split("## 来源")[1]) == questions(english.split("## Sources")[1])
    assert re.findall(r"```python\n(.*?)```", chinese, re.DOTALL) == re.findall(
        r"```python\n(.*?)```", english, re.DOTALL
    )


def headings(page: str) -> list[str]:
    return [line for line in _without_code(page).splitlines() if line.startswith("#")]


def _without_code(page: str) -> str:
    return re.sub(r"```.*?```", "", page, flags=re.DOTALL)


def addresses(page: str) -> set[str]:
    return {each.rstrip(".,;") for each in re.findall(r"https://[\w./?=&#%~:+-]+", page)}


def questions(sources: str) -> list[int]:
    """The numbers of the first sentence of the sources."""
    return [int(n) for n in re.findall(r"\d+", re.split(r"\. |。|\n\n", sources.strip() + " ", maxsplit=1)[0])]


@each_rule
def test_sources_name_the_questions_they_answer_and_an_address(rule: ModuleType) -> None:
    sources = (rule.__doc__ or "").split("## Sources")[1]
    assert re.match(r"\s*Questions? \d", sources)
    assert questions(sources)
    assert all(1 <= n <= 70 for n in questions(sources))
    assert "https://" in sources


def test_names_are_kebab_case_and_those_of_their_files() -> None:
    for name, rule in RULES.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert (rule.__file__ or "").endswith(f"/{name.replace('-', '_')}.py")


@each_rule
def test_the_pages_of_the_docs_are_those_of_the_rule(rule: ModuleType) -> None:
    for suffix, page in ((".md", rule.__doc__ or ""), (".zh-CN.md", rule.ZH)):
        path = DOCS / f"{rule.CODE}{suffix}"
        assert path.exists(), "run `make docs`"
        assert page.strip() in path.read_text("utf-8")


def test_there_is_no_page_without_a_rule() -> None:
    codes = {"README", *(rule.CODE for rule in RULES.values())}
    assert {p.name for p in DOCS.glob("*.md")} == {
        f"{code}{suffix}" for code in codes for suffix in (".md", ".zh-CN.md")
    }


def test_one_rule_may_be_selected_without_a_list() -> None:
    report = nw.check(torch.nn.LayerNorm(8), torch.randn(2, 8), select="PLC001", ignore="BNS")
    assert [*report.passed, *(n.code for n in report.not_checked)] == ["PLC001"]
