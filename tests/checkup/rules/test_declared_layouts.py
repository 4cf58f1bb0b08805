"""Attributes that say where the channels are, against what a norm does (AXS009)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checkup.rules.judging import findings

C = 8
X = torch.randn(2, C, 6, C, generator=torch.Generator().manual_seed(0))
STEPS = X[:, :, :, 0]


class _Norm(nn.Module):
    """A layer norm over an axis, with whatever it declares."""

    def __init__(self, over: int, /, **declared: Any) -> None:
        super().__init__()
        self.over = over
        self.gain, self.shift = nn.Parameter(torch.ones(C)), nn.Parameter(torch.zeros(C))
        for name, value in declared.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        if self.over == -1:
            return F.layer_norm(x, (C,), self.gain, self.shift)
        x = x - x.mean(self.over, keepdim=True)
        return x * torch.rsqrt(x.square().mean(self.over, keepdim=True) + 1e-5)


def found(norm: nn.Module, x: Tensor = X) -> list[str]:
    return [f.evidence["attribute"] for f in findings("AXS009", nn.Sequential(norm, nn.ReLU()).eval(), x)]


@pytest.mark.parametrize(
    "declared", [{"data_format": "channels_first"}, {"layout": "NCHW"}, {"channels_first": True}], ids=str
)
def test_channels_first_over_the_last_axis_is_found_whatever_it_is_called(declared: dict[str, Any]) -> None:
    assert found(_Norm(-1, **declared)) == list(declared)
    assert found(_Norm(1, **declared)) == []


def test_channels_last_over_the_second_axis_is_found() -> None:
    assert found(_Norm(1, data_format="NHWC")) == ["data_format"]
    assert found(_Norm(-1, data_format="NHWC")) == []


@pytest.mark.parametrize("declared", [{"channels_first": False}, {"data_format": "auto"}, {"mode": "fan_in"}], ids=str)
def test_what_declares_no_layout_is_none(declared: dict[str, Any]) -> None:
    assert found(_Norm(-1, **declared)) == []


def test_an_instance_norm_over_the_steps_follows_channels_first() -> None:
    assert found(_Norm(2, data_format="channels_first"), STEPS) == []


class _KeepsAxis(nn.Module):
    """A batch norm as Keras writes it: the axis is the one that is kept."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        others = tuple(a for a in range(x.ndim) if a != self.axis % x.ndim)
        x = x - x.mean(others, keepdim=True)
        return x * torch.rsqrt(x.square().mean(others, keepdim=True) + 1e-5)


def test_an_axis_that_is_kept_is_no_contradiction() -> None:
    assert found(_KeepsAxis(-1)) == []
    assert found(_Norm(1, axis=-1)) == ["axis"]
