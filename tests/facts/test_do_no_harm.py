"""A model is left exactly as it was found, whatever happens on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import normwise as nw
from normwise.facts import Facts

from .corpus_blocks import BLOCKS, DEPTH, HIDDEN, VOCABULARY, Attention, Decoder, PreDropout, ids
from .states import assert_same, state


class Batched(nn.Module):
    """A pre-norm decoder with dropout, a batch norm in its head, a tied weight and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Decoder([PreDropout() for _ in range(DEPTH)])
        self.body.head.weight = self.body.embed.weight
        self.bn, self.out = nn.BatchNorm1d(VOCABULARY), nn.Linear(VOCABULARY, 5)
        self.body.register_forward_hook(_identity)
        self.out.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.bn(self.body(tokens).mean(1)))


def _identity(_module: nn.Module, _args: Any, y: Any) -> Any:
    return y


class Stop(nn.Module):
    """Raises in the middle of a forward, after touching what a careless run would leave changed."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        random.random()
        np.random.rand()
        raise self.error


@pytest.fixture(params=["eval", "train"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """A model with gradients, seasoned statistics, and a mode that differs between modules."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Batched()
    model(*ids()).square().sum().backward()
    model.train(request.param == "train")
    model.body.train(request.param != "train")
    return model


VERBS: dict[str, Callable[..., Any]] = {"map": lambda *a: nw.map(*a), "check": lambda *a: nw.check(*a)}


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_changed(model: nn.Module, verb: str) -> None:
    inputs = ids()
    wanted, before = inputs[0].clone(), state(model)
    report = VERBS[verb](model, inputs)
    assert_same(before, state(model))
    assert torch.equal(inputs[0], wanted)
    assert report.norms


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
def test_nothing_is_changed_when_a_forward_raises(model: nn.Module, verb: str, error: BaseException) -> None:
    assert isinstance(model, Batched)
    block = model.body.blocks[2]
    assert isinstance(block, PreDropout)
    block.mlp = Stop(error)
    before = state(model)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else Exception
    with pytest.raises(expected):
        VERBS[verb](model, ids())
    assert_same(before, state(model))


@pytest.mark.parametrize("error", [RuntimeError("rule"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
def test_nothing_is_changed_when_a_rule_raises(
    model: nn.Module, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(facts: Any) -> Any:
        facts.norms  # noqa: B018
        torch.rand(3)
        raise error

    for rule in _rules():
        monkeypatch.setattr(rule, "check", broken)
    before = state(model)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            nw.check(model, ids())
    else:
        report = nw.check(model, ids())
        assert not report.findings
        assert {entry.code for entry in report.not_checked} >= {rule.CODE for rule in _rules()}
        assert any("rule" in entry.why for entry in report.not_checked)
    assert_same(before, state(model))


def test_one_broken_rule_does_not_silence_the_others(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(facts: Any) -> Any:
        raise RuntimeError("rule")

    first, *others = _rules()
    monkeypatch.setattr(first, "check", broken)
    report = nw.check(model, ids())
    silent = {entry.code for entry in report.not_checked}
    assert first.CODE in silent
    assert {rule.CODE for rule in others} - silent


@pytest.mark.parametrize("name", ["pre_in_place_on_the_stream", "pre_cached", "torch_encoder_post", "resnet_v1_train"])
def test_models_that_write_to_their_own_state_are_left_alone(name: str) -> None:
    case = next(case for case in BLOCKS if case.name == name)
    model, inputs = case.build(), case.inputs()
    kept = tuple(t.clone() for t in inputs)
    before = state(model)
    nw.check(model, inputs)
    # the version counter may move where a buffer was written and put back
    after = state(model)
    after.versions = before.versions
    assert_same(before, after)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


def test_the_model_trains_after_a_check_as_it_would_have_without() -> None:
    losses = []
    for checked in (False, True):
        torch.manual_seed(0)
        model = Batched().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if checked:
            nw.check(model, ids())
        losses.append([_step(model, optimizer) for _ in range(3)])
    assert losses[0] == losses[1]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(*ids()).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_model_that_takes_a_float_input_gets_no_gradient_on_it() -> None:
    model = nn.Sequential(nn.LayerNorm(HIDDEN), Attention())
    x = torch.randn(2, 7, HIDDEN, requires_grad=True)
    nw.check(model, (x,))
    assert x.grad is None
    assert x.requires_grad
    assert x.is_leaf


def test_a_state_that_changed_is_noticed() -> None:
    torch.manual_seed(0)
    model = Batched().train()
    before = state(model)
    model(*ids())
    with pytest.raises(AssertionError, match="tensors"):
        assert_same(before, state(model))
    model.bn.eval()
    before = state(model)
    torch.rand(1)
    with pytest.raises(AssertionError, match="random"):
        assert_same(before, state(model))


def _rules() -> list[Any]:
    from normwise.checkup import rules

    found = list(rules.all_rules().values())
    assert found
    return found


HOOK_TABLES = [n for n, v in vars(torch_module).items() if n.startswith("_global_") and isinstance(v, dict)]


def test_a_module_that_a_training_step_makes_leaves_no_hook_behind() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, 1))

    def train_step(model: nn.Module, x: Tensor) -> None:
        late = nn.Linear(HIDDEN, HIDDEN)
        model(late(x)).square().mean().backward()

    before = {name: dict(getattr(torch_module, name)) for name in HOOK_TABLES}
    target = nw.targets.target(model, torch.randn(4, HIDDEN), train_step=train_step)
    assert Facts(target).training_step.raised is None  # by itself: a check has one more guard around it
    assert {name: dict(getattr(torch_module, name)) for name in HOOK_TABLES} == before
