"""A block without the inner norms of its siblings (PLC002)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checkup.rules.judging import findings

H = 16
X = torch.randn(2, 6, H, generator=torch.Generator().manual_seed(0))


class _Layer(nn.Module):
    def __init__(self, *, normed: bool, turned: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(H), nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.q_norm, self.k_norm = (nn.RMSNorm(H // 2) if normed else nn.Identity() for _ in range(2))
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.turned:
            q = q * 0.5 + q.flip(-1).sin()
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def stack(*normed: bool, turned: tuple[bool, ...] = ()) -> nn.Module:
    torch.manual_seed(0)
    turns = turned or (False,) * len(normed)
    layers = (_Layer(normed=n, turned=t) for n, t in zip(normed, turns, strict=True))
    return nn.Sequential(*layers, nn.LayerNorm(H), nn.Linear(H, 3)).eval()


def test_an_interior_layer_without_the_qk_norm_of_the_others_is_found() -> None:
    (found,) = findings("PLC002", stack(True, True, False, True, True, True), X)
    assert (found.path, str(found.severity)) == ("2", "warning")
    assert "no inner norm" in found.message
    assert "2 qk norms" in found.message


@pytest.mark.parametrize(
    "normed",
    [(False, True, True, True, True), (True, True, True, True, False), (True, False, True, True, False, True, True)],
    ids=["the first", "the last", "a period"],
)
def test_ends_and_patterns_are_intended(normed: tuple[bool, ...]) -> None:
    assert findings("PLC002", stack(*normed), X) == []


def test_a_layer_that_does_other_work_is_no_sibling() -> None:
    normed = (True, True, True, False, True, True)
    assert findings("PLC002", stack(*normed, turned=normed), X) == []
