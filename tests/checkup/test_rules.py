"""Every rule is held to the same bar: it fires where it should, stays silent where it should, and explains itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import normwise as nw
from normwise._parts import page_title
from normwise.checkup import Finding, Report, Severity, rules
from normwise.targets import Target

RULES = rules.all_rules()
DOCS = Path(__file__).parents[2] / "docs" / "rules"
SECTIONS = ("## What it finds", "## Why it matters", "## How to fix it", "## Sources")
LONGEST_MESSAGE = 100  # characters: one line of a terminal beside code and path
# by code, prefix (family): RULES speak of axes, batch-norm state, numerics, parameters, placement, ...
FAMILIES = ("AXS", "BNS", "NUM", "PAR", "PLC", "CKP", "DYN", "DST")
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, str], Report]:
    """Every rule run on the bad and the good target of every rule."""
    made = {}
    for name, rule in RULES.items():
        made[name, "bad"] = nw.check(rule.bad())
        made[name, "good"] = nw.check(rule.good())
    return made


def own(report: Report, rule: ModuleType) -> list[Finding]:
    return [f for f in report.findings if f.code == rule.CODE]


def findings(reports: dict[tuple[str, str], Report]) -> list[Finding]:
    return [f for report in reports.values() for f in report.findings]


def test_there_are_rules() -> None:
    assert len(RULES) >= 11


def test_codes_are_a_family_and_three_digits_and_never_used_twice() -> None:
    codes = [rule.CODE for rule in RULES.values()]
    assert len(set(codes)) == len(codes)
    assert [c for c in codes if not re.fullmatch(rf"({'|'.join(FAMILIES)})\d{{3}}", c)] == []


@each_rule
def test_a_rule_fires_on_its_bad_target(rule: ModuleType, reports: dict[tuple[str, str], Report]) -> None:
    found = own(reports[name_of(rule), "bad"], rule)
    assert found
    assert min(f.severity.rank for f in found) <= rule.SEVERITY.rank


@each_rule
def test_a_bad_target_has_no_other_fault_that_would_hide_its_own(
    rule: ModuleType, reports: dict[tuple[str, str], Report]
) -> None:
    worst = [f.code for f in reports[name_of(rule), "bad"].findings if f.severity is not Severity.INFO]
    assert set(worst) == {rule.CODE}


@each_rule
def test_no_rule_at_all_reports_more_than_info_on_a_good_target(
    rule: ModuleType, reports: dict[tuple[str, str], Report]
) -> None:
    report = reports[name_of(rule), "good"]
    assert [(f.code, f.message) for f in report.findings if f.severity is not Severity.INFO] == []


@each_rule
def test_a_good_target_is_judged_and_passes(rule: ModuleType, reports: dict[tuple[str, str], Report]) -> None:
    assert rule.CODE in reports[name_of(rule), "good"].passed


@each_rule
def test_rules_leave_their_targets_as_they_found_them(rule: ModuleType, reports: dict[tuple[str, str], Report]) -> None:
    assert reports[name_of(rule), "bad"].unchanged is True
    assert reports[name_of(rule), "good"].unchanged is True


@each_rule
def test_a_rule_without_inputs_says_what_it_needs_or_judges_what_the_model_holds(rule: ModuleType) -> None:
    bad = rule.bad()
    blind = Target(model=bad.model, optimizer=bad.optimizer, inputs_from=nw.targets.InputsFrom.NONE)
    report = nw.check(blind, select=[rule.CODE])
    said = [n.why for n in report.not_checked]
    assert own(report, rule) or any("needs" in why for why in said)


@each_rule
def test_a_page_has_a_title_and_all_its_sections_in_order(rule: ModuleType) -> None:
    page = rule.__doc__ or ""
    assert re.fullmatch(r"[A-Z].*\.", page_title(rule))
    assert [line for line in page.splitlines() if line.startswith("#")] == list(SECTIONS)
    assert all(body.strip() for body in re.split(r"^## .*$", page, flags=re.MULTILINE))


@each_rule
def test_sources_name_the_questions_they_answer_and_an_address(rule: ModuleType) -> None:
    sources = (rule.__doc__ or "").split("## Sources")[1]
    numbers = [int(n) for n in re.findall(r"\d+", sources.split(". ")[0])]
    assert re.match(r"\s*Questions? \d", sources)
    assert all(1 <= n <= 70 for n in numbers)
    assert "https://" in sources


def test_names_are_kebab_case_and_those_of_their_files() -> None:
    for name, rule in RULES.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", name)
        assert (rule.__file__ or "").endswith(f"/{name.replace('-', '_')}.py")


def test_messages_fit_a_line_and_leave_the_code_to_the_report(reports: dict[tuple[str, str], Report]) -> None:
    for f in findings(reports):
        assert 0 < len(f.message) < LONGEST_MESSAGE
        assert not re.search(r"[A-Z]{3}\d{3}", f.message)
        assert not f.message.endswith(".")


def test_fixes_are_one_sentence_or_a_snippet(reports: dict[tuple[str, str], Report]) -> None:
    assert [f.fix for f in findings(reports) if not 10 < len(f.fix) < 160] == []


def test_evidence_is_plain_json_without_nan_or_infinity(reports: dict[tuple[str, str], Report]) -> None:
    for f in findings(reports):
        assert f.evidence
        json.dumps(dict(f.evidence), allow_nan=False)


def test_evidence_holds_a_number(reports: dict[tuple[str, str], Report]) -> None:
    for f in findings(reports):
        assert any(isinstance(v, (int, float)) and not isinstance(v, bool) for v in f.evidence.values()), f.code


def test_paths_begin_with_the_path_and_are_those_of_modules(reports: dict[tuple[str, str], Report]) -> None:
    for name, rule in RULES.items():
        modules = {path for path, _ in rule.bad().model.named_modules()}
        for f in own(reports[name, "bad"], rule):
            assert f.path == f.paths[0]
            assert {path.split("#")[0] for path in f.paths} <= modules


@each_rule
def test_a_page_of_the_docs_is_the_docstring_of_its_rule(rule: ModuleType) -> None:
    page = DOCS / f"{rule.CODE}.md"
    assert page.exists(), "run `make docs`"
    assert (rule.__doc__ or "").strip() in page.read_text("utf-8")


def test_there_is_no_page_without_a_rule() -> None:
    assert {p.stem for p in DOCS.glob("*.md")} - {"README"} == {rule.CODE for rule in RULES.values()}


def name_of(rule: ModuleType) -> str:
    return next(name for name, other in RULES.items() if other is rule)


def test_one_rule_may_be_selected_without_a_list() -> None:
    report = nw.check(torch.nn.LayerNorm(8), torch.randn(2, 8), select="PLC001", ignore="BNS")
    assert [*report.passed, *(n.code for n in report.not_checked)] == ["PLC001"]
