from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn

from tests.checkup.rules.judging import findings

H = 8
X = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Two sublayers, pre-norm, unless the block is odd in one of several ways."""

    def __init__(self, odd: str = "", crossed: bool = False) -> None:
        super().__init__()
        self.norm1, self.mix, self.norm2, self.mlp = nn.LayerNorm(H), nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, H)
        self.norm3, self.cross = nn.LayerNorm(H), nn.Linear(H, H)
        self.odd, self.crossed = odd, crossed

    def forward(self, x: Tensor) -> Tensor:
        if self.odd == "post":
            x = self.norm1(x + self.mix(x))
            return self.norm2(x + self.mlp(x))
        if self.odd == "bare":
            return x + self.mlp(x + self.mix(x))
        x = x + self.mix(self.norm1(x))
        if self.crossed:
            x = x + self.cross(self.norm3(x))
        y = self.mlp(self.norm2(x))
        return x + (self.norm3(y) if self.odd == "sandwich" else y)


def stack(odd: Collection[int], kind: str = "post", depth: int = 8) -> nn.Module:
    return nn.Sequential(*(Block(kind if i in odd else "") for i in range(depth)), nn.LayerNorm(H))


@pytest.mark.parametrize("kind", ["post", "bare", "sandwich"])
def test_one_odd_block_inside_is_found_and_named(kind: str) -> None:
    (found,) = findings("PLC002", stack({3}, kind), X)
    assert found.path == "3"
    assert found.evidence["odd"] == [3]
    assert found.evidence["like_the_rest"] == 7
    assert found.message.startswith("block 3 of 8 is wired ")


def test_two_odd_blocks_are_one_finding() -> None:
    (found,) = findings("PLC002", stack({5, 12}, depth=20), X)
    assert found.evidence["odd"] == [5, 12]


@pytest.mark.parametrize("odd", [{0}, {7}, {0, 7}], ids=["first", "last", "both ends"])
def test_first_and_last_blocks_may_differ(odd: set[int]) -> None:
    assert findings("PLC002", stack(odd), X) == []


@pytest.mark.parametrize("odd", [{1, 3, 5, 7}, {3, 7, 11, 15, 19, 23}], ids=["every other", "every fourth"])
def test_a_periodic_pattern_is_intended(odd: set[int]) -> None:
    assert findings("PLC002", stack(odd, depth=8 if len(odd) == 4 else 24), X) == []


@pytest.mark.parametrize("depth", [2, 3])
def test_too_few_blocks_have_no_majority(depth: int) -> None:
    assert findings("PLC002", stack({1}, depth=depth), X) == []


def test_a_stack_split_in_two_has_no_odd_block() -> None:
    assert findings("PLC002", stack({0, 1, 2, 3}), X) == []


def test_uniform_stacks_of_any_kind_are_silent() -> None:
    for kind in ("", "post", "bare", "sandwich"):
        assert findings("PLC002", stack(range(8), kind), X) == []


def test_a_block_with_one_more_sublayer_of_the_same_kind_is_no_odd_block() -> None:
    blocks = nn.Sequential(*(Block(crossed=i == 3) for i in range(8)), nn.LayerNorm(H))
    assert findings("PLC002", blocks, X) == []


def test_an_add_between_the_blocks_is_no_odd_block() -> None:
    class Injected(nn.Module):
        """A conformer with an intermediate loss feeds its prediction back halfway."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.out, self.back = (
                nn.ModuleList(Block() for _ in range(8)),
                nn.Linear(H, 3),
                nn.Linear(3, H),
            )
            self.last = nn.LayerNorm(H)

        def forward(self, x: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = block(x)
                if i == 3:
                    x = x + self.back(self.out(x).softmax(-1))
            return self.last(x)

    assert findings("PLC002", Injected(), X) == []


def test_a_block_without_norms_is_said_to_be_without() -> None:
    found = next(f for f in findings("PLC002", stack({3}, "bare"), X))
    assert "without a norm" in found.message
    assert "wired none" not in found.message
