"""Faults that today's tools miss, with transformers' overflow detector and torch's anomaly mode beside our finding.

What each said, as the tests below see it:

=========================================  ======================  ==========================  =====================
fault                                      DebugUnderflowOverflow  anomaly mode                normwise
=========================================  ======================  ==========================  =====================
float16 RMS norm, one element of 300       nothing                 nothing                     NUM001 error, the norm
(x - mu) / (sigma + eps), a constant row   nothing                 SqrtBackward0 returned nan  NUM004, the norm
Post-Norm weights, norm_first=True         nothing                 nothing                     CKP001 error, all blocks
q_global.repeat(windows, ...) as in gcvit  nothing                 nothing                     AXS001 error, the block
=========================================  ======================  ==========================  =====================

The last two compute finite numbers everywhere: only another loss, and other partners in the batch, tell.
"""

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


def encoder(*, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()


def test_post_norm_weights_in_a_pre_norm_encoder_load_strictly_and_only_the_loss_tells() -> None:
    torch.manual_seed(0)
    trained = encoder(norm_first=False)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model = encoder(norm_first=True)
    assert not any(model.load_state_dict(trained.state_dict()))
    x = torch.randn(16, 6, 16)
    said = run(model, x)
    assert said.output.isfinite().all()
    assert (said.detector, said.anomaly) == ("", "")
    y = trained(x).detach()
    evidence = {"checkpoint": trained.state_dict(), "loader": [(x, y), (x, y)]}
    found = nw.check(model, x, **evidence).findings[0]
    assert (found.code, str(found.severity)) == ("CKP001", "error")
    assert found.paths == ("layers.0", "layers.1", "layers.2")
    assert found.counterfactual is not None
    assert found.counterfactual["after"] < 1e-6 < found.counterfactual["before"]
    assert not nw.check(trained, x, select=["CKP001"], **evidence).findings


class GlobalWindows(nn.Module):
    """Attention of each window to a query made of the whole image, as in GC ViT."""

    def __init__(self, dim: int = 16, windows: int = 4, *, mixes: bool) -> None:
        super().__init__()
        self.windows, self.mixes = windows, mixes
        self.norm, self.query, self.kv = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out, self.head = nn.Linear(dim, dim), nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        rows = y.reshape(len(x) * self.windows, -1, y.shape[-1])  # the windows of a sample are neighbours
        q = self.query(y.unflatten(1, (self.windows, -1)).mean(1))
        # timm 1.0.22: the samples of the repeated query alternate, those of the windows do not
        q = q.repeat(self.windows, 1, 1) if self.mixes else q.repeat_interleave(self.windows, dim=0)
        k, v = self.kv(rows).chunk(2, dim=-1)
        attended = (q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5).softmax(-1) @ v
        return self.head((x + self.out(attended.reshape(x.shape))).mean(1))


def test_a_global_query_repeated_in_another_order_than_the_windows_mixes_the_batch_in_silence() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 36, 16)
    model, healthy = GlobalWindows(mixes=True).eval(), GlobalWindows(mixes=False).eval()
    healthy.load_state_dict(model.state_dict())
    said = run(model, x)
    assert said.output.isfinite().all()
    assert all(g.isfinite().all() for g in said.gradients)
    assert (said.detector, said.anomaly) == ("", "")
    assert torch.allclose(healthy(x)[:1], healthy(x[:1]), atol=1e-6)
    assert not torch.allclose(model(x)[:1], model(x[:1]), atol=1e-3)
    found = first(model, x)
    assert (found.code, str(found.severity), found.path) == ("AXS001", "error", "")
    assert "rows of different samples" in found.message
    assert not [f for f in nw.check(healthy, x).findings if str(f.severity) != "info"]
