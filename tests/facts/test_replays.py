"""Pieces of a graph run again, and whole runs with a norm computed otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.repairs import respecified
from normwise.facts.replay import Replayer
from normwise.targets import target

WIDTH = 8


class Long(nn.Module):
    """More ops in a row than Python recurses into."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(390):
            x = x + 1.0
        return x


def test_a_replay_that_goes_on_for_too_long_says_that_it_left_the_norm() -> None:
    facts = Facts(target(Long(), torch.randn(2, WIDTH)))
    replayer = Replayer(facts.traced, facts.target.model)
    given = facts.graph.values[facts.graph.ops[0].inputs[0]].id
    with pytest.raises(NotKnown, match="left the norm"):
        replayer(facts.graph.outputs[0], {given: torch.randn(2, WIDTH)})


def test_a_changed_eps_moves_the_outputs_and_the_same_one_does_not() -> None:
    facts = Facts(target(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)), torch.randn(3, WIDTH)))
    (out,) = facts.graph.outputs
    before = facts.runs.base.of(out)
    same = respecified(facts, facts.norm_calls.norms, lambda spec: spec).of(out)
    other = respecified(facts, facts.norm_calls.norms, lambda spec: replace(spec, eps=1.0)).of(out)
    torch.testing.assert_close(same, before)
    assert (other - before).abs().max() > 0.01


def test_a_gain_of_another_layout_proves_nothing() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(2))

        def forward(self, x: Tensor) -> Tensor:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            return x * self.scale[None, None, :, None]

    facts = Facts(target(Heads(), torch.randn(3, 5, 2, WIDTH)))
    with pytest.raises(NotKnown, match="does not reproduce"):
        respecified(facts, facts.norm_calls.norms, lambda spec: spec)
