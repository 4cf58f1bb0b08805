"""Evidence of the wrong kind costs the rules that need it, each with its reason, and nothing else."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import nn

import normwise as nw
from normwise.checkup import Report
from normwise.checkup.rules import deep_post_norm_no_warmup
from normwise.rendering import in_language
from tests.checkup.hostile import EVIDENCE, Net, example, longer, trained
from tests.facts.states import assert_same, state

# The rules that one piece of evidence may silence: those that read checkpoints are the most.
MOST = 9


@pytest.fixture(scope="module")
def without() -> Report:
    return nw.check(trained(), example())


def checked(model: nn.Module, **evidence: Any) -> Report:
    """Check, and see that nothing is left changed."""
    inputs, streams = example(), (sys.stdout, sys.stderr)
    kept, before = inputs.clone(), state(model)
    report = nw.check(model, inputs, **evidence)
    assert_same(before, state(model))
    assert torch.equal(inputs, kept)
    assert (sys.stdout, sys.stderr) == streams
    assert report.unchanged
    return report


def reasons(report: Report, without: Report) -> dict[str, str]:
    """Return the reasons of the rules that are not checked, by code, where they are others than without evidence."""
    known = {n.code: n.why for n in without.not_checked}
    return {n.code: n.why for n in report.not_checked if n.why != known.get(n.code)}


def judged(report: Report) -> set[str]:
    return set(report.passed) | {f.code for f in report.findings}


EACH = [(argument, name) for argument, made in EVIDENCE.items() for name in made()]
# a check each: every other by default
CASES = [
    pytest.param(a, name, id=f"{a}-{name}", marks=pytest.mark.slow if i % 2 else ()) for i, (a, name) in enumerate(EACH)
]


@pytest.mark.parametrize(("argument", "name"), CASES)
def test_bad_evidence_costs_the_rules_that_need_it_and_says_why(argument: str, name: str, without: Report) -> None:
    value, word = EVIDENCE[argument]()[name]
    more = {"padded_inputs": longer()} if argument == "lengths" else {}
    report = checked(trained(), **{argument: value}, **more)
    said = reasons(report, without)
    assert not [why for why in said.values() if "please report" in why]
    assert all(in_language(why, "zh") != why for why in said.values()), said
    assert word is None or any(word in why for why in said.values()), said
    assert len(judged(without) - judged(report)) <= MOST
    assert not report.placement.stacks or report.norms


def _optimizer(**settings: Any) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(_LINEAR.parameters(), lr=0.1, weight_decay=0.1)
    made.param_groups[0].update(settings)
    return made


_LINEAR = nn.Linear(2, 2)
OPTIMIZERS: dict[str, tuple[Any, str]] = {
    "of another model": (_optimizer(), "none of the model's parameters"),
    "of another model, second order": (torch.optim.LBFGS(_LINEAR.parameters()), "none of the model's parameters"),
    "without parameters": (_optimizer(params=[]), "none of the model's parameters"),
    "with a decay of no number": (_optimizer(weight_decay="much"), "no param_groups that can be read"),
    "with parameters that are numbers": (_optimizer(params=[1, 2]), "no param_groups that can be read"),
    "a string": ("adam", "no param_groups that can be read"),
    "a class": (torch.optim.Adam, "no param_groups that can be read"),
    "a list of optimizers": ([_optimizer()], "no param_groups that can be read"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_says_nothing_of_this_model_is_refused_with_a_reason(name: str, without: Report) -> None:
    optimizer, word = OPTIMIZERS[name]
    said = reasons(checked(trained(), optimizer=optimizer), without)
    assert word in said["PAR001"]
    assert in_language(said["PAR001"], "zh") != said["PAR001"]
    assert not [why for why in said.values() if "please report" in why]


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adafactor])
def test_any_optimizer_of_the_model_can_be_read(kind: Any, without: Report) -> None:
    model = trained()
    said = reasons(checked(model, optimizer=kind(list(model.parameters()), lr=0.1)), without)
    assert "PAR001" not in said
    assert not [why for why in said.values() if "please report" in why]


class _Steps:
    """A scheduler of one's own."""

    def __init__(self, optimizer: Any, rate: Any) -> None:
        self.optimizer, self.rate = optimizer, rate

    def step(self) -> None:
        self.optimizer.param_groups[0]["lr"] = self.rate() if callable(self.rate) else self.rate


def _raises() -> float:
    raise ZeroDivisionError("no rate")


SCHEDULERS: dict[str, Any] = {
    "a string": lambda _: "cosine",
    "a function": lambda _: lambda step: 0.1,
    "a class": lambda _: torch.optim.lr_scheduler.StepLR,
    "no steps": lambda optimizer: optimizer,
    "raises": lambda optimizer: _Steps(optimizer, _raises),
    "exits": lambda optimizer: _Steps(optimizer, sys.exit),
    "a rate of no number": lambda optimizer: _Steps(optimizer, "x"),
    "a rate that is not finite": lambda optimizer: _Steps(optimizer, float("nan")),
    "of no optimizer": lambda _: _Steps(None, 0.1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_that_cannot_be_followed_is_said(name: str) -> None:
    target = deep_post_norm_no_warmup.bad()
    before = state(target.model)
    assert target.optimizer is not None
    rates = [group["lr"] for group in target.optimizer.param_groups]
    wrong = dataclasses.replace(target, scheduler=SCHEDULERS[name](target.optimizer))
    (entry,) = nw.check(wrong, select=["PLC005"]).not_checked
    assert "schedule" in entry.why
    assert in_language(entry.why, "zh") != entry.why
    assert [group["lr"] for group in target.optimizer.param_groups] == rates
    assert_same(before, state(target.model))


TYPES: dict[str, list[Any]] = {
    "reference": ["abc", 3, Net, lambda x: x],
    "online": ["abc", 3, Net, lambda x: x],
    "dtype": ["float99", "", 3, float, torch.int32, torch.bool, torch.complex64, [torch.float16]],
    "claims": [5, {"causal": True}, torch.ones(2), (None,), ([1],), object()],
}


@pytest.mark.parametrize(("argument", "value"), [(a, v) for a, values in TYPES.items() for v in values])
def test_an_argument_of_the_wrong_type_is_refused_by_name(argument: str, value: Any) -> None:
    expected = "float16, bfloat16" if argument == "dtype" else f"'{argument}' is a"
    with pytest.raises(TypeError, match=expected):
        nw.check(trained(), example(), **{argument: value})


def test_a_claim_that_no_rule_reads_is_said() -> None:
    report = checked(trained(), claims=("casual",))
    assert any("'casual'" in note and "'causal'" in note for note in report.notes)
    assert not any("claim" in note for note in checked(trained(), claims=("causal",)).notes)
