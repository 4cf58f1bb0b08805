"""Checkpoints whose names all begin otherwise (CKP003), and losses that one small batch cannot tell apart (CKP001)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normwise as nw
from normwise.facts.losses import clearly_lower, leans_lower
from tests.checkup.rules.judging import findings

H = 16
X = torch.randn(4, 5, H, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, 3)).eval()


@cache
def trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return {k: t.clone() for k, t in model.state_dict().items()}


@pytest.mark.parametrize("report", [True, False], ids=["with the load report", "without"])
@pytest.mark.parametrize("prefix", ["module.", "model.encoder."])
def test_a_prefix_that_kept_everything_out_comes_first_with_its_key_map(prefix: str, report: bool) -> None:
    model, kept = net(), {prefix + k: t for k, t in trained().items()}
    info = model.load_state_dict(kept, strict=False)
    found = nw.check(model, (X,), checkpoint=kept, load_info=info if report else None, ignore=["PAR009"]).findings[0]
    assert (found.code, str(found.severity)) == ("CKP003", "error")
    assert found.evidence["key_map"] == {f"{prefix}*": "*"}
    assert prefix in found.message


def test_a_prefix_that_the_loader_took_away_is_healthy() -> None:
    model = net()
    model.load_state_dict(trained())
    assert findings("CKP003", model, X, checkpoint={f"module.{k}": t for k, t in trained().items()}) == []


def test_a_model_trained_since_is_no_load_that_failed() -> None:
    model = net()
    model.load_state_dict(trained())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    assert findings("CKP003", model, X, checkpoint={f"module.{k}": t for k, t in trained().items()}) == []


def test_four_parts_that_lean_one_way_are_not_enough_and_do_ask_for_more() -> None:
    now, other = (0.248, 0.639, 0.227, 0.229), (0.125, 0.038, 0.042, 0.130)
    assert not clearly_lower(other, now)
    assert leans_lower(other, now)
    assert not leans_lower(now, other)
    assert clearly_lower(other * 8, now * 8)


def test_a_loss_lower_on_each_of_eight_parts_is_judged_by_the_differences_whatever_the_parts_are_worth() -> None:
    hard_and_easy = torch.tensor([0.1, 0.9, 0.2, 0.7, 0.1, 0.5, 0.3, 0.8])
    other = hard_and_easy.tolist()
    now = (hard_and_easy + 0.2 + 0.05 * torch.randn(8, generator=torch.Generator().manual_seed(0))).tolist()
    assert clearly_lower(other, now)
    assert not clearly_lower(now, other)
    assert not clearly_lower(other, [*now[:7], other[7] - 0.01])  # one part the other way round
    assert not clearly_lower(other, (hard_and_easy + 0.01).tolist())  # less than a tenth


class _Sorter(nn.Module):
    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(H, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.embed, self.place = nn.Embedding(12, H), nn.Parameter(torch.randn(8, H) * 0.3)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(H, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids) + self.place))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).transpose(1, 2), ids.sort(1).values)


def evaluated(model: nn.Module, batches: Any) -> float:
    with torch.no_grad():
        return torch.stack([loss(model, b) for b in batches]).mean().item()


def test_post_norm_weights_in_pre_norm_blocks_come_before_the_missing_final_norm() -> None:
    torch.manual_seed(0)
    model = _Sorter(norm_first=False)
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    for _ in range(200):
        optimizer.zero_grad()
        loss(model, torch.randint(0, 12, (32, 8))).backward()
        optimizer.step()
    kept = {k: t.clone() for k, t in model.state_dict().items()}
    wrong = _Sorter(norm_first=True)
    info = wrong.load_state_dict(kept)
    data = [(torch.randint(0, 12, (16, 8)),) for _ in range(4)]
    report = nw.check(
        wrong.eval(), data[0], checkpoint=kept, load_info=info, eval_fn=evaluated, loader=data, select=["CKP", "PLC"]
    )
    assert next(f.code for f in report.findings) == "CKP001"
    assert findings("CKP001", model.eval(), *data[0], checkpoint=kept, eval_fn=evaluated, loader=data) == []
