"""Placements are never converted: every stream is told what it is, and how far the outputs would move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normwise.conversions import convert, plan
from normwise.errors import ConversionRefused
from tests.conversions.affine import drawn, family


class _Stream(nn.Module):
    """A post-norm stream, or with ``pre`` the same weights with every skip taken from before its norm."""

    def __init__(self, *, alpha: float = 1.0, head: bool = False, pre: bool = False) -> None:
        super().__init__()
        self.alpha, self.pre = alpha, pre
        self.embed = nn.Embedding(11, 8)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.head = nn.Linear(8, 11) if head else nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        skip = x = self.embed(ids)
        for branch, norm in zip(self.branches, self.norms, strict=True):
            total = self.alpha * skip + branch(x)
            x = norm(total)
            skip = total if self.pre else x
        return self.head(x)


IDS = torch.tensor([[1, 4, 2, 9, 0], [3, 3, 7, 10, 5]])


def _rewired(model: _Stream) -> torch.Tensor:
    other = _Stream(alpha=model.alpha, head=isinstance(model.head, nn.Linear), pre=True)
    other.load_state_dict(model.state_dict())
    return other.eval()(IDS)


@pytest.mark.parametrize("alpha", [1.0, 1.5])
def test_the_gap_is_that_of_the_rewired_model(alpha: float) -> None:
    model = _Stream(alpha=alpha)
    drawn(model)
    made = plan("post-to-pre", model, IDS)
    (refusal,) = made.refused
    before, after = model(IDS).detach(), _rewired(model).detach()
    gap = float((after - before).norm() / before.norm())
    assert gap > 0.1
    assert f"the outputs move by {100 * gap:.0f} %" in refusal.why
    assert "post-norm, x = norm(x + f(x))" in refusal.why
    assert not made.changes
    assert not made.edits
    assert not made.recipes


def test_logits_are_told_how_often_their_largest_entry_stays() -> None:
    model = _Stream(head=True)
    drawn(model)
    (refusal,) = plan("post-to-pre", model, IDS).refused
    same = (_rewired(model).argmax(-1) == model(IDS).argmax(-1)).double().mean()
    assert f"{float(same):.0%} of the positions keep their largest entry" in refusal.why


@pytest.mark.parametrize(("name", "streams"), [("bert", 1), ("bart", 2), ("albert", 1)])
def test_post_norm_families_are_refused_with_a_measured_gap(name: str, streams: int) -> None:
    made = plan("post-to-pre", family(name))
    assert len(made.refused) == streams
    assert all("measured on these inputs" in refusal.why for refusal in made.refused)
    assert all("train a pre-norm model anew" in str(refusal.unblock) for refusal in made.refused)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gptj"])
def test_pre_norm_needs_nothing(name: str) -> None:
    (refusal,) = plan("post-to-pre", family(name)).refused
    assert "pre-norm, x = x + f(norm(x))" in refusal.why
    assert refusal.why.endswith("already: there is nothing to do")
    assert refusal.unblock is None


@pytest.mark.parametrize(("name", "said"), [("gemma2", "sandwich"), ("olmo2", "normed on its branches")])
def test_other_placements_are_named(name: str, said: str) -> None:
    (refusal,) = plan("post-to-pre", family(name)).refused
    assert said in refusal.why
    assert "measured" not in refusal.why


def test_weights_without_numbers_leave_the_gap_open() -> None:
    with torch.device("meta"):
        model = _Stream().eval()
    (refusal,) = plan("post-to-pre", model, IDS.to("meta")).refused
    assert "was not measured" in refusal.why
    assert "holds no numbers" in refusal.why


def test_a_model_without_a_stream_is_told_so() -> None:
    (refusal,) = plan("post-to-pre", nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.ones(2, 4)).refused
    assert "no residual stream" in refusal.why


def test_converting_raises_with_the_reasons() -> None:
    model = _Stream()
    drawn(model)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ConversionRefused, match="another function for any weights"):
        convert("post-to-pre", model, IDS)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
