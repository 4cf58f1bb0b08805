"""SyncBatchNorm in one process, and ``convert``: replaces every batch norm, refuses what would lose something."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from normwise import layers
from normwise.layers.sync_batch_norm import SyncBatchNorm
from tests.layers.sync_scenarios import fill


def test_is_batch_norm_without_a_process_group() -> None:
    sync, single = SyncBatchNorm(3), layers.BatchNorm(3)
    x = torch.randn(4, 3, 5)
    for _ in range(2):
        assert torch.equal(sync(x), single(x))
    assert torch.equal(sync.eval()(x), single.eval()(x))
    assert sync.state_dict().keys() == nn.SyncBatchNorm(3).state_dict().keys()


def test_loads_from_torch_and_back() -> None:
    ours, theirs = SyncBatchNorm(3, momentum=None), nn.SyncBatchNorm(3, momentum=None)
    fill(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.get_parameter("weight"), theirs.weight)


def test_refuses_a_timeout_that_is_no_time() -> None:
    with pytest.raises(ValueError, match=r"given 0; pass more than 0, or None for the timeout of the process group"):
        SyncBatchNorm(3, timeout=0)


def test_copies_share_the_process_group() -> None:
    group: Any = (entry for entry in ())  # cannot be copied, like a group
    layer = SyncBatchNorm(3, process_group=group)
    twin = copy.deepcopy(layer)
    assert twin.process_group is group
    assert twin.weight is not layer.weight
    assert torch.equal(twin(torch.eye(3)), layer(torch.eye(3)))


# -- conversion ----------------------------------------


def mixed_model() -> nn.Sequential:
    shared = nn.BatchNorm2d(2, affine=False)
    ours = layers.BatchNorm(4, eps=0.1, momentum=None, channel_dim=-1, bias=False)
    return nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Sequential(shared, ours.eval()), nn.LayerNorm(4), shared)


def test_converts_torch_and_own_batch_norms_keeping_what_they_hold() -> None:
    model = mixed_model()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    first, (shared, ours), hidden, again = SyncBatchNorm.convert(model, timeout=5.0)  # type: ignore[misc]
    assert [type(each) for each in (first, shared, ours)] == [SyncBatchNorm] * 3
    assert type(hidden) is nn.LayerNorm
    assert again is shared
    assert (first.momentum, first.timeout, ours.spec.eps, ours.momentum) == (0.3, 5.0, 0.1, None)
    assert (ours.channel_dim, ours.training, ours.bias, shared.weight) == (-1, False, None, None)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_a_converted_model_computes_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), layers.BatchNorm2d(3))
    twin = SyncBatchNorm.convert(copy.deepcopy(model))
    x = torch.randn(2, 1, 6, 6)
    torch.testing.assert_close(twin(x), model(x))
    torch.testing.assert_close(dict(twin.state_dict()), dict(model.state_dict()))
    torch.testing.assert_close(twin.eval()(x), model.eval()(x))


def test_converts_a_batch_norm_itself() -> None:
    norm = nn.SyncBatchNorm(3, eps=0.5)
    made = SyncBatchNorm.convert(norm)
    assert isinstance(made, SyncBatchNorm)
    assert (made.weight is norm.weight, made.eps) == (True, 0.5)


class WithActivation(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (WithActivation(3), "place of WithActivation at 1: it does more than a batch norm, which would be lost"),
        (parametrizations.weight_norm(nn.BatchNorm1d(3)), "at 1: it does more than a batch norm"),
        (nn.LazyBatchNorm1d(), "place of LazyBatchNorm1d at 1: it has no channels yet; run one batch first"),
    ],
)
def test_refuses_to_convert_what_would_be_lost(norm: nn.Module, why: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), norm)
    with pytest.raises(ValueError, match=why):
        SyncBatchNorm.convert(model)
    assert type(model[0]) is nn.BatchNorm1d
