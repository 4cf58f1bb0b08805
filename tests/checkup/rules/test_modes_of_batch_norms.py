"""Batch norms in the wrong mode: while evaluating, while frozen, after train(); and statistics written in eval mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normwise as nw
from tests.checkup.rules.judging import findings, severities, why_not

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)) + 1


def net(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, **options), nn.ReLU(), nn.Linear(6, 2))


def as_it_is(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(b) for b in batches]


def in_eval(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    model.eval()
    return as_it_is(model, batches)


# -- evaluation in train mode -----------------------------------------------------------------------


def test_an_evaluation_in_train_mode_is_an_error_that_eval_mode_repairs() -> None:
    (found,) = findings("BNS001", net(), X, eval_fn=as_it_is)
    assert (str(found.severity), found.path) == ("error", "1")
    assert found.counterfactual is not None
    assert found.counterfactual["before"] > 0.1
    assert found.counterfactual["after"] == 0


def test_no_grad_or_not_makes_no_difference() -> None:
    assert severities("BNS001", net(), X, eval_fn=lambda m, b: [m(x) for x in b]) == ["error"]


def test_an_evaluation_that_switches_only_a_part_is_found_by_that_part() -> None:
    model = nn.Sequential(net(), nn.BatchNorm1d(2))

    def evaluate(m: nn.Sequential, batches: list[torch.Tensor]) -> None:
        m[0].eval()
        m(batches[0])

    assert [f.paths for f in findings("BNS001", model, X, eval_fn=evaluate)] == [("1",)]


def test_train_mode_by_itself_is_no_fault() -> None:
    assert "eval_fn" in why_not("BNS001", net(), X)
    assert severities("BNS001", net().eval(), X) == []


def test_an_evaluation_that_raises_is_not_checked() -> None:
    assert "ZeroDivisionError" in why_not("BNS001", net(), X, eval_fn=lambda m, b: 1 / 0)


class Frozen(nn.Module):
    """A batch norm that knows no train mode, as detectors use it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(6))
        self.register_buffer("running_var", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.get_buffer("running_mean")) * (self.get_buffer("running_var") + 1e-5).rsqrt()


def test_a_norm_that_ignores_train_mode_is_never_in_it() -> None:
    model = nn.Sequential(nn.Linear(4, 6), Frozen(), nn.Linear(6, 2))
    for code in ("BNS001", "BNS007"):
        assert severities(code, model.requires_grad_(False), X, eval_fn=as_it_is) == []


class Own(nn.Module):
    """A batch norm by hand."""

    def __init__(self, *, always: bool, replace: bool = False) -> None:
        super().__init__()
        self.always, self.replace = always, replace
        self.register_buffer("running_mean", torch.zeros(6))
        self.register_buffer("running_var", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        live = self.training or self.always
        if live and self.replace:
            self.running_mean = 0.9 * self.get_buffer("running_mean") + 0.1 * x.mean(0).detach()
        mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
        return F.batch_norm(x, mean, var, training=live and not self.replace)


# -- statistics written in eval mode ----------------------------------------------------------------


@pytest.mark.parametrize("replace", [False, True])
def test_a_norm_that_updates_in_eval_mode_is_an_error(replace: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), Own(always=True, replace=replace))
    (found,) = findings("BNS002", model.eval(), X)
    assert str(found.severity) == "error"
    assert found.evidence["value"] > 0


@pytest.mark.parametrize("replace", [False, True])
def test_a_norm_that_updates_in_train_mode_only_is_none(replace: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 6), Own(always=False, replace=replace))
    assert severities("BNS002", model.train(), X) == []


class Caching(nn.Module):
    """A position counter beside a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(x.shape[0])
        return self.norm(x)


def test_a_counter_beside_a_norm_is_no_statistic() -> None:
    assert severities("BNS002", Caching(), X) == []


# -- frozen parts -----------------------------------------------------------------------------------


def frozen(*, eval_mode: bool = False) -> nn.Sequential:
    model = nn.Sequential(net(), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[0].train(not eval_mode)
    return model


def test_a_frozen_part_with_live_norms_is_a_warning_with_its_drift() -> None:
    (found,) = findings("BNS007", frozen(), X)
    assert (str(found.severity), found.path) == ("warning", "0")
    assert found.counterfactual is not None
    assert (found.counterfactual["before"] > 0.05, found.counterfactual["after"]) == (True, 0)


def test_a_frozen_part_in_eval_mode_passes() -> None:
    assert severities("BNS007", frozen(eval_mode=True), X) == []


def test_trained_gains_or_a_declaration_say_that_the_norms_shall_learn() -> None:
    model = frozen()
    model[0].get_submodule("1").requires_grad_(True)
    assert severities("BNS007", model, X) == []
    declared = frozen()
    vars(declared[0])["train_bn"] = True
    assert severities("BNS007", declared, X) == []


def test_a_model_of_which_nothing_is_trained_is_left_alone() -> None:
    assert severities("BNS007", net().requires_grad_(False), X) == []


def test_norms_frozen_alone_are_worth_knowing() -> None:
    model = net()
    model[1].requires_grad_(False)
    assert severities("BNS007", model, X) == ["info"]


def test_a_norm_without_momentum_moves_nothing() -> None:
    model = nn.Sequential(net(momentum=0.0), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert severities("BNS007", model, X) == []


# -- eval mode undone -------------------------------------------------------------------------------


def held() -> nn.Sequential:
    model = net().train()
    model[1].eval()
    return model


def back_to_train(model: nn.Module, batches: list[torch.Tensor]) -> None:
    in_eval(model, batches)
    model.train()


def test_an_evaluation_that_ends_in_train_mode_undoes_the_freezing() -> None:
    (found,) = findings("BNS008", held(), X, eval_fn=back_to_train)
    assert (str(found.severity), found.evidence["in"]) == ("warning", "eval_fn")


def test_an_evaluation_that_restores_each_mode_does_not() -> None:
    def careful(model: nn.Module, batches: list[torch.Tensor]) -> None:
        modes = {m: m.training for m in model.modules()}
        in_eval(model, batches)
        for module, mode in modes.items():
            module.training = mode

    assert severities("BNS008", held(), X, eval_fn=careful) == []


def test_without_the_users_code_it_is_only_said_what_train_would_do() -> None:
    assert severities("BNS008", held(), X) == ["info"]


def test_a_model_in_eval_mode_has_nothing_to_undo() -> None:
    assert severities("BNS008", net().eval(), X, eval_fn=back_to_train) == []


def test_every_rule_leaves_the_modes_alone() -> None:
    model = held()
    assert nw.check(model, X, eval_fn=back_to_train, train_step=lambda m, x: m.train()(x).sum().backward()).unchanged
    assert [m.training for m in model] == [True, False, True, True]
