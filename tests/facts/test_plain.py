"""Safeguards are taken out of the traced program where they are neutral, and only there."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normwise as nw
from normwise import layers
from normwise.facts.plain import plain
from normwise.facts.replay import Replayer
from normwise.graph import Recording, trace
from normwise.targets.target import Target

from .corpus_norms import NORMS, NormCase, host, inputs

SAFEGUARDED = [
    "rms_power_of_two",
    "rms_divided_when_large",
    "rms_factor_chosen",
    "layer_row_chosen",
    "layer_all_chosen",
    "layer_compensated",
    "layer_compensated_sums",
    "layer_value_pinned",
    "rms_value_pinned",
    "batch_compensated",
]


class Applied(nn.Module):
    """A projection and a function of it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.function = nn.Linear(10, 24), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.into(x))


def _traced(model: nn.Module, *args: Tensor) -> tuple[Recording, Recording]:
    recording = trace(Target(model=model, args=args))
    return recording, plain(recording, model)


def _output(recording: Recording, model: nn.Module, x: Tensor) -> Tensor:
    graph = recording.graph
    given = next(v.id for v in graph.values if v.kind == "input")
    return Replayer(recording, model)(graph.outputs[0], {given: x.double()})


@pytest.mark.parametrize("case", [c for c in NORMS if c.name in SAFEGUARDED], ids=lambda case: case.name)
def test_the_program_without_safeguards_is_shorter_and_computes_the_same(case: NormCase) -> None:
    model, (x,) = host(case), inputs(case)
    raw, short = _traced(model, x)
    assert sum(bool(op.outputs) for op in short.graph.ops) < sum(bool(op.outputs) for op in raw.graph.ops)
    assert [op.id for op in short.graph.ops] == [op.id for op in raw.graph.ops]
    torch.testing.assert_close(_output(short, model, x), _output(raw, model, x), rtol=1e-6, atol=1e-6)


ACTING = {
    "a bound that ordinary rows reach": lambda x: x / x.abs().amax(-1, keepdim=True).clamp(min=1.0),
    "a scale of ordinary size": lambda x: x * torch.exp2(-x.abs().amax(-1, keepdim=True).log2().floor()),
    "a choice that falls either way": lambda x: torch.where(x.amax(-1, keepdim=True) > 1.0, x, -x),
    "a difference of two values": lambda x: x + (x.relu() - x.tanh()),
    "a difference that carries gradients": lambda x: x + (x.relu() - x),
    "the mean of something else": lambda x: x.tanh() - x.mean(-1, keepdim=True),
    "a mean over another axis": lambda x: (x - x.mean(-1, keepdim=True)) - (x - x.mean(-1, keepdim=True)).mean(1, True),
    "two axes in turn": lambda x: F.relu(_centred(x, -1)) + _centred(_centred(x, -1), 1),
    "half of a mean": lambda x: _centred(x, -1) - 0.5 * _centred(x, -1).mean(-1, keepdim=True),
}


def _centred(x: Tensor, axis: int) -> Tensor:
    return x - x.mean(axis, keepdim=True)


@pytest.mark.parametrize("name", ACTING)
def test_what_acts_on_ordinary_rows_stays(name: str) -> None:
    raw, short = _traced(Applied(ACTING[name]), torch.randn(2, 7, 10))
    assert short is raw


def test_what_was_unused_before_stays() -> None:
    def function(x: Tensor) -> Tensor:
        F.layer_norm(x, (24,))  # thrown away by the user, not by us
        return x + (x.relu() - x.relu()) * 1.0 + (x.tanh() - x.tanh())

    raw, short = _traced(Applied(function), torch.randn(2, 7, 10))
    assert "layer_norm" in {op.short for op in short.graph.ops if op.outputs}
    assert short is raw, "the halves of each difference are computed twice: nothing says that they are equal"


def test_a_difference_of_a_value_with_itself_goes_with_what_was_computed_for_it() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.tanh()
        return x.relu() + (y - y.detach())

    _, short = _traced(Applied(function), torch.randn(2, 7, 10))
    assert [op.short for op in short.graph.ops if op.outputs] == ["linear", "relu"]


def test_the_mean_of_another_modules_output_is_that_modules_input() -> None:
    """A norm of what a module before it has centred is still a norm that centres."""
    model = nn.Sequential(nn.Linear(10, 24), Centring(), Centred(), nn.Linear(24, 5))
    (site,) = nw.map(model.eval(), torch.randn(2, 7, 10)).norms
    assert site.spec is not None
    assert (site.path, str(site.spec.kind)) == ("2", "layer")


class Centring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _centred(x, -1)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        c = _centred(x, -1)
        return c * torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-5)


class InHalf(nn.Module):
    """RMSNorm that squares in the dtype of its input, with or without a guard."""

    def __init__(self, *, guarded: bool) -> None:
        super().__init__()
        self.guarded = guarded

    def forward(self, x: Tensor) -> Tensor:
        if self.guarded:
            exponent = torch.linalg.vector_norm(x.detach(), math.inf, -1, keepdim=True).log2().floor()
            x = x * torch.exp2(4 - exponent.clamp_min(4))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4)


@pytest.mark.parametrize("guarded", [False, True])
def test_rules_that_feed_hard_rows_run_the_guard(guarded: bool) -> None:
    model = nn.Sequential(nn.Linear(10, 24), InHalf(guarded=guarded), nn.Linear(24, 5)).half().eval()
    report = nw.check(model, torch.randn(2, 7, 10).half())
    assert [str(site.evidence) for site in report.norms] == ["verified"]
    assert {str(f.severity) for f in report.findings} == ({"info"} if guarded else {"error"})


def test_a_long_model_without_safeguards_is_returned_as_it_is() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10), nn.SiLU()) for _ in range(20)))
    raw, short = _traced(model.eval(), torch.randn(2, 10))
    assert short is raw


def test_one_proof_serves_all_layers_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = Replayer.__call__

    def counted(self: Replayer, *args: object, **options: object) -> Tensor:
        calls.append(args[0])
        return run(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Replayer, "__call__", counted)
    _traced(nn.Sequential(*(layers.RMSNorm(8) for _ in range(12))), torch.randn(2, 8))
    assert len(calls) == 3, "one row of each size, for the first layer alone"
