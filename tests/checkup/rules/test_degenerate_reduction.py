from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normwise.targets import InputsFrom, Target
from tests.checkup.rules.judging import findings, severities


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.LayerNorm(1), (3, 1)),
        (nn.RMSNorm(1), (3, 1)),
        (nn.GroupNorm(4, 4), (3, 4)),
        (nn.GroupNorm(4, 4), (3, 4, 1, 1)),
        (nn.LayerNorm([1, 1]), (3, 1, 1)),
    ],
    ids=lambda case: str(case),
)
def test_a_statistic_of_one_element_is_an_error(norm: nn.Module, shape: tuple[int, ...]) -> None:
    assert severities("AXS007", norm, torch.randn(shape)) == ["error"]


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.LayerNorm(2), (3, 2)),
        (nn.GroupNorm(2, 4), (3, 4)),
        (nn.GroupNorm(4, 4), (3, 4, 1, 2)),
        (nn.BatchNorm1d(1), (3, 1)),
        (nn.BatchNorm2d(4), (1, 4, 1, 1)),
    ],
    ids=lambda case: str(case),
)
def test_two_elements_or_running_statistics_are_enough(norm: nn.Module, shape: tuple[int, ...]) -> None:
    assert findings("AXS007", norm.eval(), torch.randn(shape)) == []


def test_a_hand_written_norm_of_one_element_is_found() -> None:
    class Hand(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    (found,) = findings("AXS007", nn.Sequential(nn.Linear(4, 1), Hand()), torch.randn(3, 4))
    assert "sign" in found.message


def test_the_finding_is_true_the_output_ignores_the_input() -> None:
    norm = nn.LayerNorm(1)
    assert torch.equal(norm(torch.randn(5, 1)), norm(torch.randn(5, 1)))


def test_a_map_that_is_one_pixel_only_at_the_size_normwise_chose_is_worth_knowing() -> None:
    norm = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.GroupNorm(4, 4))
    image = torch.randn(2, 3, 5, 5)
    assert severities("AXS007", norm, image) == ["error"]
    import normwise as nw

    chosen = Target(model=norm, args=(image,), inputs_from=InputsFrom.INFERRED)
    (found,) = nw.check(chosen, select=["AXS007"]).findings
    assert found.severity == "info"
