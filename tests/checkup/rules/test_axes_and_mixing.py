"""The rules of statistics' axes: what they say of planted faults, and their silence on what is meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import normwise as nw
from normwise.checkup import Finding
from normwise.rendering.languages import in_language
from tests.checkup.rules.judging import findings, severities, why_not
from tests.facts.test_probes import Convolutions, Memory, Rms, Steps, Transformer, Windows, ids, speech


def of_family(model: nn.Module, *inputs: Any, **evidence: Any) -> list[Finding]:
    """Return what the whole family finds above info."""
    report = nw.check(model, inputs, select=["AXS"], **evidence)
    return [f for f in report.findings if f.severity != "info"]


# -- AXS001 ------------------------------------------------------------------------------


def test_a_batch_norm_without_running_statistics_mixes_samples_in_eval() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 2)).eval()
    (found,) = findings("AXS001", model, torch.randn(4, 6))
    assert (found.severity, found.path) == ("error", "1")
    assert found.counterfactual is not None
    assert found.counterfactual["before"] > 1e-2
    assert found.counterfactual["after"] < 1e-5


def test_in_a_model_that_is_being_trained_statistics_of_the_batch_are_worth_knowing() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 2)).train()
    assert severities("AXS001", model, torch.randn(4, 6)) == ["info"]


def test_rows_of_different_samples_in_one_op_are_an_error_and_name_the_op() -> None:
    x = torch.randn(4, 12, 8)
    (found,) = findings("AXS001", Windows(confused=True).eval(), x)
    assert found.severity == "error"
    assert "attention" in found.evidence["op"] or "matmul" in found.evidence["op"]
    assert findings("AXS001", Windows(confused=False).eval(), x) == []


def test_contrast_within_a_batch_is_only_named() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.left(x))
            return x @ x.T

    (found,) = findings("AXS001", Contrast().eval(), torch.randn(4, 6))
    assert found.severity == "info"
    assert "no norm" in found.message


# -- AXS002, AXS003 ----------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self, norm: nn.Module, *, channels_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head, self.first = nn.Embedding(11, 8), norm, nn.Linear(8, 3), channels_first

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) if self.first else self.norm(x)
        return self.head(x)


@pytest.mark.parametrize("norm", [nn.InstanceNorm1d(8), nn.GroupNorm(2, 8)], ids=str)
def test_a_norm_over_the_steps_of_tokens_is_a_warning(norm: nn.Module) -> None:
    (found,) = findings("AXS002", Encoder(norm, channels_first=True).eval(), ids())
    assert found.severity == "warning"
    assert found.evidence["axes"][2] == "time"


def test_norms_of_each_step_and_batch_norms_are_no_norms_over_the_sequence() -> None:
    for norm in (nn.LayerNorm(8), Rms(-1)):
        assert findings("AXS002", Encoder(norm).eval(), ids()) == []
    assert findings("AXS002", Encoder(nn.BatchNorm1d(8), channels_first=True).eval(), ids()) == []


def test_signals_normalized_over_time_are_worth_knowing() -> None:
    assert severities("AXS002", Convolutions(nn.GroupNorm(2, 4)).eval(), speech()) == ["info"]


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 8), nn.GroupNorm(4, 8), nn.InstanceNorm2d(8)], ids=str)
def test_images_have_no_steps(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    assert of_family(model, torch.randn(2, 3, 12, 12)) == []


def test_a_leak_is_reported_once_and_not_as_a_norm_over_the_sequence_too() -> None:
    found = of_family(Transformer(nn.LayerNorm(8), Rms(-2, -1)).eval(), ids())
    assert [(f.code, f.severity, f.path) for f in found] == [("AXS003", "error", "norms.1")]


def test_signals_of_a_causal_convolution_leak_for_sure_only_where_causality_is_claimed() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.read, self.norm, self.head = nn.Conv1d(3, 4, 3, padding=2), nn.GroupNorm(1, 4), nn.Conv1d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.read(x)[..., :-2]))

    assert severities("AXS003", Causal().eval(), speech()) == ["warning"]
    assert severities("AXS003", Causal().eval(), speech(), claims=("causal",)) == ["error"]


def test_an_encoder_with_the_same_norm_is_told_of_the_axes_alone() -> None:
    found = of_family(Transformer(Rms(-2, -1), causal=False).eval(), ids())
    assert [(f.code, f.severity) for f in found] == [("AXS002", "warning")]


# -- AXS004, AXS005 ----------------------------------------------------------------------


def test_padding_in_eval_is_an_error_and_in_training_a_warning() -> None:
    x = speech()
    for norm, severity in ((nn.GroupNorm(4, 4), "error"), (nn.BatchNorm1d(4), "warning")):
        given = {"padded_inputs": (functional.pad(x, (0, 20)),), "lengths": (12, 12)}
        (found,) = findings("AXS004", Convolutions(norm).eval(), x, **given)
        assert (found.severity, found.path) == (severity, "norm")
        assert found.counterfactual is not None
        assert found.counterfactual["after"] < 1e-5


class Masked(nn.BatchNorm1d):
    """A batch norm that leaves padding out."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        real = mask[:, None].to(x)
        mean = (x * real).sum((0, 2)) / real.sum()
        var = ((x - mean[None, :, None]).square() * real).sum((0, 2)) / real.sum()
        return (x - mean[None, :, None]) / (var[None, :, None] + self.eps).sqrt() * real


def test_a_masked_batch_norm_is_healthy_in_every_way() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.norm = nn.Conv1d(3, 4, 1), Masked(4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.norm(self.read(x) * mask[:, None], mask)

    mask = torch.ones(2, 12, dtype=torch.bool)
    longer = functional.pad(speech(), (0, 20)), functional.pad(mask, (0, 20))
    assert of_family(Model().train(), speech(), mask, padded_inputs=longer) == []


def test_absolute_positions_moved_by_padding_are_not_blamed_on_a_norm() -> None:
    class Reversed(nn.Module):
        """Positions counted from the end, as padding on the left shifts them."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place, self.norm = nn.Embedding(11, 8), nn.Embedding(40, 8), nn.LayerNorm(8)
            self.running = nn.BatchNorm1d(8)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]).flip(0))
            return self.running(self.norm(x).transpose(1, 2))

    found = of_family(Reversed().eval(), ids(), padded_inputs=(functional.pad(ids(), (0, 9)),))
    assert [f for f in found if f.evidence.get("mode") == "eval"] == []


def test_without_padding_the_rule_says_what_it_needs_unless_no_norm_could_see_any() -> None:
    assert "padded_inputs" in why_not("AXS004", Convolutions(nn.GroupNorm(4, 4)).eval(), speech())
    assert findings("AXS004", Transformer(nn.LayerNorm(8)).eval(), ids()) == []
    assert (
        findings("AXS004", Convolutions(Steps()).eval(), speech(), padded_inputs=functional.pad(speech(), (0, 9))) == []
    )


def test_evidence_of_the_wrong_kind_leaves_the_rule_unchecked() -> None:
    assert "not the samples" in why_not(
        "AXS004", Convolutions(nn.GroupNorm(4, 4)).eval(), speech(), padded_inputs=torch.randn(2, 3, 40)
    )


def test_a_step_decoded_with_other_axes_is_an_error() -> None:
    (found,) = of_family(Memory((-1,), (-2, -1)).eval(), ids())
    assert (found.code, found.severity, found.path) == ("AXS005", "error", "norm")
    assert of_family(Memory((-1,), (-1,)).eval(), ids()) == []


# -- AXS008, AXS009 ----------------------------------------------------------------------


class Tutorial(nn.Module):
    """The norm of a well-known tutorial, or its proper form."""

    def __init__(self, width: int, *, biased: bool) -> None:
        super().__init__()
        self.a_2, self.b_2, self.biased = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), biased

    def forward(self, x: Tensor) -> Tensor:
        if self.biased:
            return functional.layer_norm(x, x.shape[-1:], self.a_2, self.b_2, 1e-6)
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


def tabular(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Linear(8, 3)).eval()


def test_an_unbiased_variance_is_worth_knowing_with_its_factor_and_what_a_repair_moves() -> None:
    (found,) = findings("AXS008", tabular(Tutorial(8, biased=False)), torch.randn(4, 6))
    assert found.severity == "info"
    assert found.evidence["value"] == pytest.approx((7 / 8) ** 0.5)
    assert found.counterfactual is not None
    assert found.counterfactual["after"] / found.counterfactual["before"] == pytest.approx((8 / 7) ** 0.5, rel=1e-3)


def test_a_reference_that_divides_by_n_makes_it_a_warning() -> None:
    wrong, right = tabular(Tutorial(8, biased=False)), tabular(Tutorial(8, biased=True))
    assert severities("AXS008", wrong, torch.randn(4, 6), reference=right) == ["warning"]
    assert severities("AXS008", wrong, torch.randn(4, 6), reference=wrong) == ["info"]
    assert findings("AXS008", right, torch.randn(4, 6), reference=right) == []


class Mean(nn.Module):
    """A root mean square over n or n - 1."""

    def __init__(self, width: int, less: int) -> None:
        super().__init__()
        self.weight, self.less = nn.Parameter(torch.ones(width)), less

    def forward(self, x: Tensor) -> Tensor:
        mean = x.square().sum(-1, keepdim=True) / (x.shape[-1] - self.less)
        return self.weight * x * torch.rsqrt(mean + 1e-6)


@pytest.mark.parametrize("width", [8, 700])
def test_a_root_mean_square_over_n_less_one_is_one_too(width: int) -> None:
    def made(less: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, width), Mean(width, less), nn.Linear(width, 3)).eval()

    x = torch.randn(4, 6)
    (found,) = findings("AXS008", made(1), x, reference=made(0))
    assert (str(found.severity), found.path) == ("warning", "1")
    assert found.counterfactual is not None
    assert found.counterfactual["after"] < 1e-5 < found.counterfactual["before"]
    assert severities("AXS008", made(1), x) == ["info"]
    assert findings("AXS008", made(0), x, reference=made(0)) == []


class Branch(nn.Module):
    """A small branch on a large stream."""

    def __init__(self, *, biased: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.write = Tutorial(16, biased=biased), nn.Linear(16, 16)
        with torch.no_grad():
            self.write.weight.mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.write(self.norm(x))


def test_a_small_branch_does_not_hide_it_from_the_reference() -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    (found,) = findings("AXS008", Branch(biased=False), x, reference=Branch(biased=True))
    assert str(found.severity) == "warning"
    assert found.counterfactual is not None
    assert found.counterfactual["before"] < 1e-3


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.RMSNorm(8), Tutorial(8, biased=True)], ids=lambda n: type(n).__name__
)
def test_biased_forms_pass(norm: nn.Module) -> None:
    assert findings("AXS008", tabular(norm), torch.randn(4, 6)) == []


class Declared(nn.Module):
    """A root mean square over one axis, whatever it declares."""

    def __init__(self, reduced: int, /, **declared: Any) -> None:
        super().__init__()
        self.reduced = reduced
        for name, value in declared.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(self.reduced, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    ("declared", "measured"),
    [({"axis": -2}, [-1]), ({"dim": -2}, [-1]), ({"num_groups": 2}, 1), ({"normalized_shape": (5, 8)}, [-1])],
    ids=str,
)
def test_what_is_declared_and_not_done_is_a_warning(declared: dict[str, Any], measured: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 8), Declared(-1, **declared), nn.Linear(8, 2)).eval()
    (found,) = findings("AXS009", model, torch.randn(2, 5, 6))
    assert (found.severity, found.path, found.evidence["measured"]) == ("warning", "1", measured)


@pytest.mark.parametrize(
    "declared", [{"axis": -1}, {"dim": 8}, {"num_groups": 1}, {"normalized_shape": (8,)}, {"dim": (-1,)}, {}], ids=str
)
def test_what_is_declared_and_done_passes_and_a_width_is_no_axis(declared: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), Declared(-1, **declared), nn.Linear(8, 2)).eval()
    assert findings("AXS009", model, torch.randn(2, 5, 6)) == []


@pytest.mark.parametrize(
    "norm",
    [nn.GroupNorm(2, 8), nn.GroupNorm(8, 8), nn.LayerNorm([8, 4, 4]), nn.BatchNorm2d(8), nn.InstanceNorm2d(8)],
    ids=str,
)
def test_torchs_own_norms_do_what_they_declare(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm).eval()
    assert findings("AXS009", model, torch.randn(2, 3, 6, 6)) == []


def test_groups_of_a_convolution_are_no_norms() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.groups, self.weight = 4, nn.Parameter(torch.randn(8, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            y = functional.conv1d(x, self.weight, groups=self.groups)
            return y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-6)

    assert findings("AXS009", Gated().eval(), torch.randn(2, 8, 9)) == []


# -- languages ---------------------------------------------------------------------------


def test_findings_and_reasons_are_said_in_chinese_as_well() -> None:
    (found,) = findings("AXS001", nn.Sequential(nn.Linear(6, 8), Rms(0)).eval(), torch.randn(4, 6))
    assert "批次" in in_language(found.message, "zh")
    assert "补齐" in in_language(why_not("AXS004", Convolutions(nn.GroupNorm(4, 4)).eval(), speech()), "zh")
