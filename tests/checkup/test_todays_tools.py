"""Faults that today's tools miss, with transformers' overflow detector and torch's anomaly mode beside our finding."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import normwise as nw
from normwise.checkup import Finding

debug_utils = pytest.importorskip("transformers.debug_utils")


@dataclass
class Said:
    """What a run under a tool brought to light."""

    output: Tensor
    gradients: list[Tensor]
    detector: str  # what DebugUnderflowOverflow printed or raised; empty where it saw nothing
    anomaly: str  # the same of anomaly mode


def run(model: nn.Module, x: Tensor) -> Said:
    """Run forward and backward under both tools."""
    printed = io.StringIO()
    detector = ""
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        debug_utils.DebugUnderflowOverflow(model)
        try:
            model(x).float().sum().backward()
        except ValueError as stop:
            detector = printed.getvalue() + str(stop)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for module in model.modules():
        module._forward_hooks.clear()
    anomaly = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that anomaly mode is slow
        with torch.autograd.detect_anomaly(check_nan=True):
            try:
                model(x).float().sum().backward()
            except RuntimeError as stop:
                anomaly = str(stop)
    model.zero_grad()
    return Said(output=model(x).detach(), gradients=gradients, detector=detector, anomaly=anomaly)


def first(model: nn.Module, x: Tensor) -> Finding:
    return nw.check(model.eval(), (x,)).findings[0]


class SquaresInHalf(nn.Module):
    """The RMSNorm of many notes, in the dtype of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class DeviationPlusEps(nn.Module):
    """(x - mu) / (sigma + eps), with the root of the variance written out."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        sigma = centred.pow(2).mean(-1, keepdim=True).sqrt()
        return centred / (sigma + 1e-5)


def test_a_float16_rms_norm_that_loses_a_row_to_one_large_element_is_seen_by_us_alone() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x[0, 3] = 300.0  # any element of 256 or more squares to infinity
    model = nn.Sequential(SquaresInHalf(64), nn.Linear(64, 8, bias=False)).half()
    said = run(model, x.half())
    assert said.output[0].eq(0).all()  # exactly zero, and finite: nothing to see
    assert said.output[1:].ne(0).all()
    assert said.output.isfinite().all()
    assert (said.detector, said.anomaly) == ("", "")
    found = first(model, x.half())
    assert (found.code, str(found.severity), found.path) == ("NUM001", "error", "0")
    codes = [f.code for f in nw.check(model, (x.half(),)).findings]
    assert codes[:2] == ["NUM001", "NUM002"]  # the cause, then the row that it cost here


def test_an_eps_beside_the_deviation_and_one_constant_row_is_misnamed_by_anomaly_mode() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    x[2] = 0  # padding, an isolated node
    model = nn.Sequential(nn.Linear(4, 8, bias=False), DeviationPlusEps(), nn.Linear(8, 1))
    said = run(model, x)
    assert said.output.isfinite().all()
    assert any(not g.isfinite().all() for g in said.gradients)
    assert said.detector == ""  # it watches the forward
    assert "nan" not in said.anomaly or "SqrtBackward" in said.anomaly  # an op, not the norm and not the cause
    found = first(model, x)
    assert (found.code, found.path) == ("NUM004", "1")
    assert "eps outside the root" in found.message
    assert found.counterfactual is not None
    assert found.counterfactual["after"] == 0
