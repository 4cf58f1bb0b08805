"""A factor on the skip where the branch should have it (PLC011), and the wirings that have one there rightly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.checkup.rules.judging import findings, severities

H = 16
X = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(0))
Add = Callable[["_Block", Tensor, Tensor], Tensor]


class _Block(nn.Module):
    def __init__(self, add: Add) -> None:
        super().__init__()
        self.norm, self.mlp, self.gate = nn.LayerNorm(H), nn.Linear(H, H), nn.Linear(H, H)
        self.small, self.zero = nn.Parameter(torch.full((H,), 1e-2)), nn.Parameter(torch.zeros(()))
        self.joined = add

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(self, x, self.mlp(self.norm(x)))


class _After(_Block):
    """Scales the whole stream behind the add: the next branch reads it, too."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.mlp(self.norm(x))) * self.small


def stack(add: Add, kind: type[_Block] = _Block) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(add) for _ in range(4)), nn.LayerNorm(H), nn.Linear(H, 3)).eval()


def test_a_layer_scale_on_the_skip_is_found_and_the_repair_keeps_the_input() -> None:
    (found,) = findings("PLC011", stack(lambda b, x, f: x * b.small + f), X)
    assert (str(found.severity), found.evidence["scale"]) == ("warning", pytest.approx(0.01))
    assert found.counterfactual is not None
    assert found.counterfactual["before"] < 0.3 < 0.9 < found.counterfactual["after"]


def test_a_small_constant_on_the_skip_is_found() -> None:
    assert severities("PLC011", stack(lambda _, x, f: 0.1 * x + f), X) == ["warning"]


@pytest.mark.parametrize(
    "add",
    [
        lambda b, x, f: x + f * b.small,
        lambda b, x, f: x + f * b.zero,
        lambda b, x, f: x * b.small + f * (1 - b.small),
        lambda b, x, f: x * (1 - b.gate(x).sigmoid()) + f * b.gate(x).sigmoid(),
        lambda _, x, f: 0.1 * x + 0.9 * f,
        lambda _, x, f: 0.9 * x + f,
        lambda _, x, f: (x + f) * 0.5**0.5,
        lambda _, x, f: 1.7 * x + f,
    ],
    ids=["layer scale", "rezero", "convex, learned", "highway", "convex", "momentum", "both", "deep norm"],
)
def test_other_factors_are_healthy(add: Add) -> None:
    assert findings("PLC011", stack(add), X) == []


def test_a_factor_of_the_whole_stream_is_no_factor_of_the_skip() -> None:
    assert findings("PLC011", stack(lambda _, x, f: x + f, _After), X) == []
