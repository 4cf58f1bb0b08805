"""Every injector of the benchmark at work on one small architecture, and the page made of the stored results."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.faults import run as runner
from bench.faults import trial as trials
from bench.faults.case import Case, Fault
from bench.faults.injectors import FAULTS
from bench.faults.known import MISSES, SURPRISES
from bench.faults.page import CHINESE, ENGLISH, Figures, figures, page, summary, unexplained
from bench.faults.settings import healthy

import normwise as nw
from normwise.checkup import rules

ROOT = Path(__file__).parents[2]
# small architectures; a fault is tried in the first in which the stored results have found it
SMALL = (
    "torch:pre", "mlp:batch-norm", "conv:batch-norm", "torch:post", "decoder:pre", "decoder:deep-norm",
    "decoder:sandwich", "encoder:deep-post", "decoder:qk-norm", "llama", "distilbert", "gemma2",
)  # fmt: skip
CODES = {rule.CODE for rule in rules.all_rules().values()}


@cache
def stored() -> list[dict[str, Any]]:
    return runner.read()


@cache
def sound(architecture: str, setting: str, dtype: torch.dtype) -> Case:
    return healthy(architecture, setting, dtype)


def placed(fault: Fault) -> tuple[Case, Case, list[str]]:
    """A small architecture, healthy and with the fault alive."""
    found = {r["architecture"] for r in stored() if r["fault"] == fault.name and r.get("found")}
    architecture = next(name for name in SMALL if name in found)
    case = sound(architecture, fault.setting, fault.dtype)
    named = trials.Trial(architecture, fault.name, fault.setting, str(fault.dtype).removeprefix("torch."))
    faulty, paths = trials.injected(named, case)
    assert trials.alive(case, faulty, fault)
    return case, faulty, paths


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_alive_and_found_at_the_right_module(name: str) -> None:
    fault = FAULTS[name]
    case, faulty, paths = placed(fault)
    report = nw.check(faulty.model, faulty.inputs, select=fault.codes, **faulty.evidence)
    judged = trials.judged(fault, report, report, trials.places(case, paths))
    assert (judged["found"], judged["right"]) == (True, True), report.findings


def test_every_expected_rule_exists_and_every_family_has_faults() -> None:
    expected = {code for fault in FAULTS.values() for code in (*fault.codes, *fault.effects)}
    assert expected <= CODES
    assert {code[:3] for code in CODES} == {fault.codes[0][:3] for fault in FAULTS.values()}
    assert len({fault.codes[0] for fault in FAULTS.values()}) >= 45


def test_an_injection_leaves_the_healthy_model_alone() -> None:
    case = sound("torch:pre", "plain", torch.float32)
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    trials.injected(trials.Trial("torch:pre", "eps-outside-root", "plain", "float32"), case)
    assert {type(m).__name__ for m in case.model.modules()}.isdisjoint({"EpsOutsideRoot"})
    assert all(torch.equal(tensor, before[name]) for name, tensor in case.model.state_dict().items())


def test_a_fault_that_does_nothing_is_counted_as_equivalent(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Fault(name="nothing", codes=("PLC001",), what=("nothing", "无"), inject=lambda case: [case.norms[0].path])
    monkeypatch.setitem(FAULTS, "nothing", nothing)
    record = trials.run(trials.Trial("mlp:batch-norm", "nothing", "plain", "float32"))
    assert record["status"] == "equivalent"
    counted = Figures([record])
    assert (counted.equivalent, counted.alive) == (1, [])


def test_a_fault_that_fits_nowhere_says_why() -> None:
    record = trials.run(trials.Trial("mlp:batch-norm", "final-norm-missing", "plain", "float32"))
    assert (record["status"], record["why"]) == ("unfit", "no pre-norm stack of four blocks")


def test_a_whole_trial_has_its_baselines_and_says_nothing_besides() -> None:
    record = trials.run(trials.Trial("mlp:batch-norm", "negative-variance", "loaded", "float32"))
    assert record["status"] == "alive"
    assert (record["found"], record["right"], record["others"]) == (True, True, [])
    assert record["detector"] == (True, True)  # a negative variance makes NaN, which the detector sees


def test_what_the_fault_does_not_explain_is_counted_against_the_check() -> None:
    case, faulty, paths = placed(FAULTS["drawn-gains"])
    report = nw.check(faulty.model, faulty.inputs, select=["PAR003"])
    clean = nw.check(case.model, case.inputs, select=["PAR003"])
    told = trials.judged(FAULTS["eps-outside-root"], report, clean, trials.places(case, paths))
    assert [code for code, *_ in told["others"]] == ["PAR003"]
    assert not told["found"]


# -- the stored results ------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "name"), [(ENGLISH, "fault-benchmark.md"), (CHINESE, "fault-benchmark.zh-CN.md")])
def test_the_page_is_made_of_the_stored_results(words: object, name: str) -> None:
    assert isinstance(words, type(ENGLISH))
    assert (ROOT / "docs" / name).read_text("utf-8") == page(stored(), words)


def test_the_stored_results_keep_what_was_promised() -> None:
    records = stored()
    total, by_rule, _ = figures(records)
    assert len({r["architecture"] for r in total.alive}) >= 25
    assert len([code for code, of_rule in by_rule.items() if of_rule.alive]) >= 45
    assert total.recall >= 0.90
    assert total.placed >= 0.95
    assert unexplained(records) == []
    assert [r for r in records if r["status"] == "failed"] == []


def test_every_fault_that_is_missed_somewhere_has_its_reason() -> None:
    missed = {r["fault"] for r in figures(stored())[0].alive if not r["found"]}
    assert missed <= set(MISSES)


def test_the_allowed_findings_on_healthy_models_are_listed_surprises() -> None:
    text = (ROOT / "docs" / "true-surprises.md").read_text("utf-8")
    assert all(f"`{architecture}`" in text and f"[{code}]" in text for architecture, code in SURPRISES)


def test_the_summary_names_what_was_missed() -> None:
    record = {
        "architecture": "a", "fault": "eps-outside-root", "setting": "plain", "dtype": "float32", "status": "alive",
        "found": False, "right": False, "others": [], "at": "", "whispered": True, "seconds": 1.0,
        "detector": [False, False], "anomaly": [True, False],
    }  # fmt: skip
    assert "missed a/eps-outside-root   (info)" in summary([record])
    assert "recall 0.0% of 1" in summary([record])
