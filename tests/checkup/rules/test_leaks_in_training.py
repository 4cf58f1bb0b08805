"""Batch statistics of a causal model that is being trained span later steps (AXS003)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checkup.rules.judging import findings, severities

X = torch.randn(6, 1, 14, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(6 * 14).view(6, 14) * 7 % 11


class _Causal(nn.Module):
    """Two causal convolutions, each behind a norm."""

    def __init__(self, *, batch: bool, tokens: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8) if tokens else nn.Conv1d(1, 8, 1)
        self.convolutions = nn.ModuleList(nn.Conv1d(8, 8, 2, bias=not batch) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) if batch else nn.GroupNorm(1, 8) for _ in range(2))
        self.tokens, self.batch = tokens, batch

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).transpose(1, 2) if self.tokens else self.embed(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = convolution(F.pad(x, (1, 0)))
            x = norm(x).relu() if self.batch else F.layer_norm(x.transpose(1, 2), (8,)).transpose(1, 2).relu()
        return x if not self.tokens else x.transpose(1, 2)


def model(*, batch: bool = True, tokens: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return _Causal(batch=batch, tokens=tokens)


def test_a_causal_forecaster_trained_with_batch_norm_is_warned() -> None:
    (found,) = findings("AXS003", model().train(), X, claims=("causal",))
    assert (str(found.severity), found.paths) == ("warning", ("norms.0", "norms.1"))
    assert found.counterfactual is not None
    assert found.counterfactual["after"] == 0.0 < 0.01 < found.counterfactual["before"]


def test_tokens_without_a_claim_are_for_information() -> None:
    assert severities("AXS003", model(tokens=True).train(), IDS) == ["info"]


def test_eval_mode_other_norms_and_models_that_claim_nothing_are_silent() -> None:
    assert findings("AXS003", model().eval(), X, claims=("causal",)) == []
    assert findings("AXS003", model(batch=False).train(), X, claims=("causal",)) == []
    assert findings("AXS003", model().train(), X) == []


@pytest.mark.parametrize("given", ["optimizer", "train_step"])
def test_a_model_in_eval_mode_that_is_trained_is_judged_as_in_training(given: str) -> None:
    net = model().eval()
    evidence = {
        "optimizer": torch.optim.SGD(net.parameters(), 0.1),
        "train_step": lambda m, x: m(x).square().mean().backward(),
    }
    assert severities("AXS003", net, X, claims=("causal",), **{given: evidence[given]}) == ["warning"]
