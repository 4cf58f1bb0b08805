from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.checkup.rules.judging import findings

H = 8
X = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, *, first: bool = False, second: bool = False) -> None:
        super().__init__()
        self.norm1, self.mix, self.norm2, self.mlp = nn.LayerNorm(H), nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, H)
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        x = self._add(x, self.norm1, self.mix, self.first)
        return self._add(x, self.norm2, self.mlp, self.second)

    @staticmethod
    def _add(x: Tensor, norm: nn.Module, branch: nn.Module, slip: bool) -> Tensor:
        if slip:
            x = norm(x)
            return x + branch(x)
        return x + branch(norm(x))


def test_a_first_sublayer_that_adds_to_its_norm_is_found_in_every_block() -> None:
    (found,) = findings("PLC003", nn.Sequential(*(Block(first=True) for _ in range(6)), nn.LayerNorm(H)), X)
    assert found.paths == tuple(f"{i}.norm1" for i in range(6))
    assert found.evidence["adds_from_a_norm"] == 6
    assert found.evidence["adds"] == 12


def test_a_second_sublayer_that_adds_to_its_norm_is_found() -> None:
    (found,) = findings("PLC003", nn.Sequential(*(Block(second=True) for _ in range(6)), nn.LayerNorm(H)), X)
    assert found.paths == tuple(f"{i}.norm2" for i in range(6))


@pytest.mark.parametrize("where", ["first", "second"])
def test_one_slip_is_this_fault_and_not_an_odd_block_as_well(where: str) -> None:
    model = nn.Sequential(*(Block(**({where: True} if i == 3 else {})) for i in range(8)), nn.LayerNorm(H))
    (found,) = findings("PLC003", model, X)
    assert found.path.startswith("3.norm")
    assert findings("PLC002", model, X) == []


def test_a_stack_that_normalizes_the_stream_everywhere_is_post_norm_by_design() -> None:
    assert findings("PLC003", nn.Sequential(*(Block(first=True, second=True) for _ in range(6))), X) == []


def test_an_embedding_norm_before_clean_blocks_is_no_fault() -> None:
    model = nn.Sequential(nn.LayerNorm(H), *(Block() for _ in range(4)), nn.LayerNorm(H))
    assert findings("PLC003", model, X) == []


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_encoders_are_no_fault(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(H, 2, 16, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(H), enable_nested_tensor=False)
    assert findings("PLC003", model.eval(), X) == []


class PostBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mix, self.norm2, self.mlp = nn.LayerNorm(H), nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.mix(x))
        return self.norm2(x + self.mlp(x))


def test_a_whole_post_norm_block_among_others_is_an_odd_block_not_this() -> None:
    model = nn.Sequential(*(PostBlock() if i == 3 else Block() for i in range(8)), nn.LayerNorm(H))
    assert findings("PLC003", model, X) == []
    assert [f.path for f in findings("PLC002", model, X)] == ["3"]


class Closed(nn.Module):
    """A module with a closing norm, followed by an add of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mix = nn.Sequential(Block(), nn.LayerNorm(H)), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x + self.mix(x)


def test_the_closing_norm_of_a_module_is_not_part_of_the_add_that_follows() -> None:
    assert findings("PLC003", nn.Sequential(Closed(), Block(), Block(), nn.LayerNorm(H)), X) == []


def test_a_block_in_which_both_sublayers_slip_is_found() -> None:
    class Slips(nn.Module):
        def __init__(self, slips: bool) -> None:
            super().__init__()
            self.n1, self.a, self.n2, self.f = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
            self.slips = slips

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.slips:
                x = x + self.a(self.n1(x))
                return x + self.f(self.n2(x))
            h = self.n1(x)
            x = h + self.a(h)
            h = self.n2(x)
            return h + self.f(h)

    model = nn.Sequential(*(Slips(i == 2) for i in range(6)), nn.LayerNorm(8))
    (found,) = findings("PLC003", model, torch.randn(2, 3, 8))
    assert found.paths == ("2.n1", "2.n2")
