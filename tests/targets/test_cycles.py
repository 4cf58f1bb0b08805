from __future__ import annotations

import pytest
import torch
from torch import nn

import normwise as nw
from normwise.errors import TargetError
from normwise.targets.cycles import refuse


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def test_a_module_that_contains_itself_is_refused_with_both_places() -> None:
    model = nn.Sequential(Inner(), Inner())
    model[1].add_module("owner", model)
    with pytest.raises(TargetError, match=r"Sequential: the module at '1.owner' is the one at '' that contains it"):
        nw.check(model, torch.randn(2, 4))


def test_a_cycle_below_the_model_is_found() -> None:
    model = nn.Sequential(Inner())
    model[0].add_module("me", model[0])
    with pytest.raises(TargetError, match=r"the module at '0.me' is the one at '0' that contains it"):
        refuse(model, "it")


def test_a_shared_module_is_no_cycle() -> None:
    shared = Inner()
    refuse(nn.Sequential(shared, nn.Sequential(shared, Inner()), shared), "it")
    assert nw.map(nn.Sequential(shared, shared), torch.randn(2, 4)).norms[0].calls == 2


def test_modules_nested_deeper_than_calls_are_refused() -> None:
    with pytest.raises(TargetError, match=r"Sequential: its modules are nested more than \d+ levels deep"):
        nw.check(_nested(3000), torch.randn(2, 4))


def test_modules_may_be_nested_nearly_as_deep_as_calls() -> None:
    refuse(_nested(700), "deep")


def _nested(levels: int) -> nn.Module:
    model: nn.Module = Inner()
    for _ in range(levels):
        model = nn.Sequential(model)
    return model
