"""One kind of norm in the place of another: exact in evaluation, or said to be a start."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from normwise import layers
from normwise.conversions import Plan, apply_to_model, apply_to_state, swap_layers
from tests.conversions import hand_written as hand
from tests.conversions.hand_written import of_transformers, redrawn, relative


def exchanged(model: nn.Module, to: str, **options: Any) -> tuple[Any, Plan]:
    plan = swap_layers.plan_of_model(model, to=to, **options)
    twin = copy.deepcopy(model)
    apply_to_model(plan, twin)
    return twin, plan


@pytest.mark.parametrize(
    ("norm", "to"),
    [
        (nn.BatchNorm2d(6), "sync-batch-norm"),
        (layers.BatchNorm2d(6), "frozen-batch-norm"),
        (hand.Activated(6, nn.SiLU()), "sync-batch-norm"),
        pytest.param(hand.Activated(6, nn.SiLU()), "frozen-batch-norm", marks=pytest.mark.slow),
    ],
)
def test_batch_norms_to_sync_and_frozen_and_back_stay_the_same_in_evaluation(norm: nn.Module, to: str) -> None:
    model = redrawn(nn.Sequential(nn.Conv2d(3, 6, 3), copy.deepcopy(norm))).eval()
    x = torch.randn(2, 3, 6, 6)
    other, plan = exchanged(model, to)
    assert plan.exact
    assert isinstance(other[1], layers.SyncBatchNorm if to.startswith("sync") else layers.FrozenBatchNorm)
    assert relative(other(x), model(x)) < 1e-6
    back, plan = exchanged(other, "batch-norm")
    assert isinstance(back[1], layers.BatchNorm)
    assert relative(back(x), model(x)) < 1e-6
    assert back.state_dict().keys() == model.state_dict().keys()
    assert back[1].weight.requires_grad
    assert exchanged(back, "batch-norm")[1].changes == ()


def test_a_frozen_norm_does_not_learn_and_its_activation_stays() -> None:
    model = redrawn(nn.Sequential(hand.Activated(6)))
    frozen, plan = exchanged(model, "frozen-batch-norm")
    before = copy.deepcopy(frozen.state_dict())
    assert frozen.train()(torch.randn(4, 6, 3, 3)).min().item() == 0.0
    assert list(frozen.parameters()) == []
    assert plan.dropped == ("0.num_batches_tracked",)
    assert apply_to_state(plan, model.state_dict()).keys() == frozen.state_dict().keys()
    assert all(torch.equal(before[key], value) for key, value in frozen.state_dict().items())


def test_torchs_sync_batch_norm_becomes_ours_and_ours_is_left() -> None:
    model = redrawn(nn.Sequential(nn.SyncBatchNorm(6)))
    ours, _ = exchanged(model, "sync-batch-norm")
    assert type(ours[0]) is layers.SyncBatchNorm
    assert ours.state_dict().keys() == model.state_dict().keys()
    assert exchanged(ours, "sync-batch-norm")[1].changes == ()


def test_an_activation_that_cannot_be_kept_is_never_lost() -> None:
    for to in ("sync-batch-norm", "frozen-batch-norm", "group-norm"):
        assert swap_layers.plan_of_model(nn.Sequential(hand.Rectified(6)), to=to).changes == ()


def test_a_lazy_batch_norm_is_refused() -> None:
    plan = swap_layers.plan_of_model(nn.Sequential(nn.LazyBatchNorm1d()), to="sync-batch-norm")
    assert "it has no channels yet; run one batch first" in plan.refused[0].why


def test_layer_norm_to_rms_norm_says_it_is_a_start_and_keeps_gain_and_shift() -> None:
    model = redrawn(nn.Sequential(nn.LayerNorm(6), hand.GammaBeta(6), nn.LayerNorm(6, bias=False)))
    twin, plan = exchanged(model, "rms-norm")
    assert (plan.exact, len(plan.changes)) == (False, 3)
    assert "a start for fine-tuning" in plan.notes[0]
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert all(not each.spec.center for each in twin)
    x = torch.randn(4, 6)
    x -= x.mean(-1, keepdim=True)
    assert relative(twin[0](x), model[0](x)) < 1e-6  # the two agree where the mean is zero
    assert relative(twin[1](x), model[1](x)) < 1e-6
    bare, plan = exchanged(model, "rms-norm", bias=False)
    assert plan.dropped == ("0.bias", "1.beta")
    assert list(bare.state_dict()) == ["0.weight", "1.gamma", "2.weight"]


def test_rms_norm_to_layer_norm_keeps_the_gain() -> None:
    model = redrawn(nn.Sequential(nn.RMSNorm(6, eps=1e-5), of_transformers("gemma.GemmaRMSNorm", 6)))
    twin, plan = exchanged(model, "layer-norm")
    assert not plan.exact
    x = torch.randn(4, 6)
    x -= x.mean(-1, keepdim=True)
    for theirs, ours in zip(model, twin, strict=True):
        assert isinstance(ours, layers.LayerNorm)
        assert relative(ours(x), theirs(x)) < 1e-5
    assert twin.state_dict().keys() == model.state_dict().keys()


def test_batch_norm_to_group_norm_needs_groups_that_divide() -> None:
    model = redrawn(nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(8), hand.Activated(8)))
    twin, plan = exchanged(model, "group-norm", groups=4)
    assert "6 channels cannot be split into 4 groups; groups=3 can" in plan.refused[0].why
    assert [type(each) for each in twin] == [nn.BatchNorm2d, layers.GroupNorm, layers.GroupNorm]
    assert (plan.exact, twin[1].num_groups) == (False, 4)
    assert set(plan.dropped) == {
        f"{i}.{name}" for i in (1, 2) for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    x = torch.randn(2, 8, 3, 3)
    assert relative(twin[1](x), nn.functional.group_norm(x, 4, model[1].weight, model[1].bias)) < 1e-6
    assert twin[2](x).min().item() == 0.0
