"""Saturated attention, and the scale of the logits behind a norm on queries and keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import normwise as nw
from normwise.facts import Facts
from normwise.targets import InputsFrom, Target, Weights
from tests.checkup.rules.judging import findings, severities

D, HEADS, T = 64, 4, 16
X = torch.randn(2, T, D, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Attention with chosen heads sharpened, through the fused op or by hand."""

    def __init__(self, sharpen: float, heads: int = HEADS, *, fused: bool = True, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv = nn.LayerNorm(D), nn.Linear(D, 3 * D, bias=False)
        self.fused, self.causal = fused, causal
        with torch.no_grad():
            self.qkv.weight[: heads * D // HEADS] *= sharpen
            self.qkv.weight[D : D + heads * D // HEADS] *= sharpen

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        if self.fused:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            mask = torch.full((T, T), -1e9).triu(1) if self.causal else torch.zeros(T, T)
            y = (q @ k.transpose(-1, -2) / math.sqrt(D // HEADS) + mask).softmax(-1) @ v
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("fused", [False, True], ids=["by hand", "fused"])
def test_an_attention_whose_heads_are_all_saturated_is_a_warning(fused: bool, causal: bool) -> None:
    (found,) = findings("PLC010", Attention(10.0, fused=fused, causal=causal), X)
    assert found.severity == "warning"
    assert found.counterfactual is not None
    assert found.counterfactual["after"] == pytest.approx(1.0, abs=0.3)


def test_by_hand_and_fused_are_read_alike() -> None:
    read = [findings("PLC010", Attention(10.0, fused=f, causal=True), X)[0].evidence["value"] for f in (True, False)]
    assert read[0] == pytest.approx(read[1], rel=1e-4)


@pytest.mark.parametrize("heads", [0, 1, 2])
def test_a_few_sharp_heads_are_what_attention_is_for(heads: int) -> None:
    assert findings("PLC010", Attention(10.0, heads), X) == []


def test_random_weights_are_not_judged() -> None:
    target = Target(model=Attention(10.0), args=(X,), weights=Weights.RANDOM)
    assert ["trained" in n.why for n in nw.check(target, select="PLC010").not_checked] == [True]


class Cosine(nn.Module):
    """Attention of normalized queries and keys with a chosen scale."""

    def __init__(self, scale: float | nn.Parameter, *, length: float) -> None:
        super().__init__()
        self.qkv, self.scale, self.length = nn.Linear(D, 3 * D, bias=False), scale, length

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (nn.functional.normalize(t, dim=-1) * self.length for t in (q, k))
        return (q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v


@pytest.mark.parametrize(
    ("length", "scale", "expected"),
    [
        (math.sqrt(D), 1 / math.sqrt(D), []),
        (1.0, math.sqrt(D), []),
        (1.0, 10.0, []),
        (math.sqrt(D), 5.473 / math.sqrt(D), []),
        (math.sqrt(D), 1.0, ["warning"]),
        (1.0, 1 / math.sqrt(D), ["warning"]),
    ],
    ids=["rms", "unit", "fixed temperature", "Muse Spark", "1/sqrt(d) forgotten", "1/sqrt(d) left in place"],
)
def test_the_scale_must_go_with_the_norm(length: float, scale: float, expected: list[str]) -> None:
    torch.manual_seed(0)
    assert severities("PLC009", Cosine(scale, length=length), X) == expected


def test_a_learned_temperature_chooses_its_own_scale() -> None:
    torch.manual_seed(0)
    assert findings("PLC009", Cosine(nn.Parameter(torch.tensor(100.0)), length=1.0), X) == []


def test_a_bool_mask_hides_its_keys_from_the_measure() -> None:
    class Masked(Attention):
        def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(seen != 0)[:, None, None])

    seen = torch.ones(2, T, dtype=torch.long)
    seen[:, T // 2 :] = 0
    (all_seen,) = Facts(Target(model=Masked(1.0), args=(X, torch.ones_like(seen)))).attentions
    (half,) = Facts(Target(model=Masked(1.0), args=(X, seen))).attentions
    assert all_seen.measured.spread != half.measured.spread
    assert half.measured.entropy[0] > 0.9


def test_without_inputs_it_says_so() -> None:
    report = nw.check(Target(model=Attention(1.0), inputs_from=InputsFrom.NONE), select="PLC009")
    assert ["inputs" in n.why for n in report.not_checked] == [True]


def test_gains_beside_the_scale_may_choose_it() -> None:
    class Gained(Cosine):
        def __init__(self) -> None:
            super().__init__(1.0, length=1.0)
            self.q_norm, self.k_norm = nn.RMSNorm(D), nn.RMSNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (self.q_norm(q) @ self.k_norm(k).transpose(-1, -2)).softmax(-1) @ v

    torch.manual_seed(0)
    assert severities("PLC009", Gained(), X) == ["info"]
