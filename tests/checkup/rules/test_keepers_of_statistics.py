"""Running statistics under names of their own: written in eval mode (BNS002), or mostly the last batch's (BNS015)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normwise.facts import keepers
from tests.checkup.rules.judging import findings, severities

X = torch.randn(16, 3, 8, generator=torch.Generator().manual_seed(0))
Blend = Callable[["_Norm", Tensor, Tensor], Tensor]


def in_place(self: _Norm, old: Tensor, new: Tensor) -> Tensor:
    return old.mul_(1 - self.share).add_(self.share * new)


def assigned(self: _Norm, old: Tensor, new: Tensor) -> Tensor:
    return (1 - self.share) * old + self.share * new


def averaged(self: _Norm, old: Tensor, new: Tensor) -> Tensor:
    return old + (new - old) / self.seen


class _Norm(nn.Module):
    """A batch norm written by hand over the channels of [B, C, T]."""

    def __init__(self, share: float, *, always: bool = False, blend: Blend = in_place) -> None:
        super().__init__()
        self.share, self.always, self.blend, self.seen = share, always, blend, 0
        self.register_buffer("centre", torch.zeros(1, 3, 1))
        self.register_buffer("spread", torch.ones(1, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean((0, 2), keepdim=True), x.var((0, 2), keepdim=True)
        if self.training or self.always:
            self.seen += 1
            with torch.no_grad():
                self.centre = self.blend(self, self.get_buffer("centre"), mean)
                self.spread = self.blend(self, self.get_buffer("spread"), var)
        if not self.training:
            mean, var = self.get_buffer("centre"), self.get_buffer("spread")
        return (x - mean) / (var + 1e-5).sqrt()


def model(norm: nn.Module) -> nn.Module:
    return nn.Sequential(norm, nn.Conv1d(3, 2, 1)).eval()


@pytest.mark.parametrize("blend", [in_place, assigned])
def test_statistics_that_an_inference_writes_are_found_whatever_they_are_called(blend: Blend) -> None:
    (found,) = findings("BNS002", model(_Norm(0.1, always=True, blend=blend)), X)
    assert (found.path, found.evidence["buffers"]) == ("0", ["0.centre", "0.spread"])
    assert findings("BNS002", model(_Norm(0.1, blend=blend)), X) == []


def test_a_share_the_other_way_round_is_measured() -> None:
    (found,) = findings("BNS015", model(_Norm(0.9)).train(), X)
    assert (str(found.severity), found.evidence["value"]) == ("warning", pytest.approx(0.9, abs=1e-4))
    assert severities("BNS015", model(_Norm(0.9)), X) == ["info"]
    assert findings("BNS015", model(_Norm(0.1)).train(), X) == []


def test_a_plain_average_has_no_momentum() -> None:
    assert keepers.read(model(_Norm(0.1, blend=averaged)))["0"].momentum is None
    assert findings("BNS015", model(_Norm(0.1, blend=averaged)).train(), X) == []


def test_other_buffers_are_no_running_statistics() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(3))
            self.register_buffer("values", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.keys, self.values = x[0, :, 0].detach(), x[0, :, 1].detach()
            return x + self.keys[:, None]

    assert keepers.read(model(Cache())) == {}
    assert findings("BNS002", model(Cache()), X) == []


def test_the_model_is_left_as_it_was() -> None:
    norm = _Norm(0.1, always=True)
    keepers.read(model(norm))
    assert torch.equal(norm.get_buffer("centre"), torch.zeros(1, 3, 1))
    assert norm.seen == 0
