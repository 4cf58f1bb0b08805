"""Batch norms stay where folding them would change the function, and the refusal says what stands in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from normwise.conversions import plan
from tests.conversions.folding import folded, reasons, redrawn


def _pair(**arguments: bool) -> Any:
    return redrawn(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **arguments)))


def test_training_mode_is_refused() -> None:
    model = _pair().train()
    made = plan("fold-batch-norm", model, torch.randn(2, 3, 6, 6).double())
    assert not made.changes
    assert "call .eval()" in str(made.refused[0])


def test_one_norm_left_in_training_mode_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).double().eval()
    model[1].train()
    made = plan("fold-batch-norm", model, torch.randn(2, 3, 6, 6).double())
    assert [change.path for change in made.changes] == ["3"]
    assert [refusal.path for refusal in made.refused] == ["1"]


def test_missing_running_statistics_are_refused() -> None:
    why = reasons(_pair(track_running_stats=False), 2, 3, 6, 6)["1"]
    assert "not with running statistics" in why
    assert "track_running_stats=True" in why


class _OfBatch(nn.BatchNorm2d):
    """Holds running statistics and does not use them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, training=True, momentum=0.0
        )


def test_a_norm_that_uses_the_batch_in_eval_mode_is_refused() -> None:
    model = redrawn(nn.Sequential(nn.Conv2d(3, 4, 3), _OfBatch(4)))
    assert "it normalizes with the batch in eval mode" in reasons(model, 2, 3, 6, 6)["1"]


class _TwoInputs(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), _TwoInputs(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x), x > 0)


def test_a_norm_that_is_given_more_than_its_input_is_refused() -> None:
    assert "norm is given 2 tensors" in reasons(redrawn(_Masked()), 2, 3, 6, 6)["norm"]


def test_a_norm_over_tokens_behind_a_linear_map_is_refused() -> None:
    model = redrawn(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)))
    assert "do not lie along the feature axis" in reasons(model, 2, 6, 5)["1"]


class _OneConvTwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.conv(self.a(self.conv(x)).relu()))


class _OneOutputTwoNorms(_OneConvTwoNorms):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.a(y) * self.b(y)


class _Residual(_OneConvTwoNorms):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y + self.a(y).relu()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
        self.second, self.b = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.second(self.a(self.first(x)).relu()))


class _OneNormTwice(_OneConvTwoNorms):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(3, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.other(self.a(self.conv(x)).relu()))


class _TwoNames(_OneConvTwoNorms):
    def __init__(self) -> None:
        super().__init__()
        self.b = self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.conv(x))


class _GainReadElsewhere(_OneConvTwoNorms):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.conv(x)) * self.a.weight.abs().sum()


class _WeightReadElsewhere(_OneConvTwoNorms):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.conv(x)) * self.conv.weight.square().mean()


class _NormInForward(_OneConvTwoNorms):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(x, self.conv.weight, self.conv.bias)
        return nn.functional.batch_norm(y, self.a.running_mean, self.a.running_var).relu()


class _Concatenated(_OneConvTwoNorms):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.cat([self.conv(x), x], 1))


class _PartOfChannels(_OneConvTwoNorms):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)[:, :2])


class _ComputedWeight(_OneConvTwoNorms):
    """A weight stored in eight bits, as weight-only quantisation does."""

    packed: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.randint(-9, 9, (4, 5), dtype=torch.int8))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.functional.linear(x.flatten(1)[:, :5], self.packed.to(x) * 0.1, x.new_zeros(4)))


class _SharedGain(_OneConvTwoNorms):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.conv(x)) + self.b(x)


class _Chosen(_OneConvTwoNorms):
    """Channels in an order that depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.a(y[:, x.mean((0, 2, 3)).argsort()])


class _WrittenOver(_OneConvTwoNorms):
    """An identity in the norm's place would let the convolution read what is written over its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        y = self.a(x)
        x.mul_(2)
        return torch.conv2d(y, self.conv.weight, self.conv.bias) + x[..., 1:-1, 1:-1]


class _WrittenThroughAView(_OneConvTwoNorms):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        view = x.view(-1)
        x.relu_()
        y = self.a(x)
        view.mul_(2)
        return torch.conv2d(y, self.conv.weight, self.conv.bias)


@pytest.mark.parametrize(
    ("make", "path", "why"),
    [
        (_WrittenThroughAView, "a", "mul in the model writes over its input"),
        (_SharedGain, "a", "its weight is shared: a.weight, b.weight"),
        (_Chosen, "a", "index stands between"),
        (_WrittenOver, "a", "mul in the model writes over its input"),
        (_OneConvTwoNorms, "a", "conv.weight is used 2 times"),
        (_OneConvTwoNorms, "b", "conv.weight is used 2 times"),
        (_OneOutputTwoNorms, "a", "is also read by batch_norm in b"),
        (_Residual, "a", "is also read by add in the model"),
        (_Tied, "a", "is shared: first.weight, second.weight"),
        (_Tied, "b", "is shared: first.weight, second.weight"),
        (_OneNormTwice, "a", "its module runs 2 times"),
        (_TwoNames, "a", "registered under several paths"),
        (_GainReadElsewhere, "a", "its weight is also read outside it"),
        (_WeightReadElsewhere, "a", "conv.weight is used 2 times"),
        (_NormInForward, "", "stands in the forward of the model itself"),
        (_Concatenated, "norm", "cat stands between"),
        (_PartOfChannels, "norm", "reads a part of the channels of conv"),
        (_ComputedWeight, "norm", "the weight of linear in the model is computed by mul"),
    ],
)
def test_shared_layers_and_norms_are_refused(make: Callable[[], nn.Module], path: str, why: str) -> None:
    assert why in reasons(redrawn(make()), 2, 3, 6, 6)[path]


def test_a_norm_whose_buffers_another_forward_uses_did_run() -> None:
    assert list(reasons(redrawn(_NormInForward()), 2, 3, 6, 6)) == ["", "b"]  # b did not


class _Crepe(nn.Module):
    """The block of torchcrepe: convolution, ReLU, norm, max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.next = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.next(nn.functional.max_pool2d(self.norm(self.conv(x).relu()), 2))


def test_a_nonlinear_op_between_is_named_with_its_line() -> None:
    model = redrawn(_Crepe())
    why = reasons(model, 2, 3, 12, 12)["norm"]
    assert "relu stands between it and the layer before it, and max_pool2d in the model reads its output" in why
    refusal = plan("fold-batch-norm", model, torch.randn(2, 3, 12, 12).double()).refused[0]
    assert refusal.op == "aten.relu"
    assert str(refusal.source).startswith("tests/conversions/test_fold_batch_norm_refusals.py:")
    assert refusal.unblock


@pytest.mark.parametrize("between", [nn.MaxPool2d(2), nn.Softmax(1), nn.LocalResponseNorm(2), nn.Hardswish()])
def test_what_does_not_commute_with_the_norm_keeps_it(between: nn.Module) -> None:
    model = redrawn(nn.Sequential(nn.Conv2d(3, 4, 3), between, nn.BatchNorm2d(4)))
    assert list(reasons(model, 2, 3, 8, 8)) == ["2"]


@pytest.mark.parametrize(
    "parametrise",
    [
        lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)),
        lambda: parametrizations.orthogonal(nn.Conv2d(3, 4, 3)),
        lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3), dim=1),
        lambda: parametrizations.weight_norm(nn.ConvTranspose2d(3, 4, 3)),
        lambda: spectral_norm(nn.Conv2d(3, 4, 3)),
    ],
)
def test_other_parametrisations_are_refused_with_how_to_remove_them(parametrise: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(parametrise(), nn.BatchNorm2d(4)).double().eval()
    why = reasons(model, 2, 3, 6, 6)["1"]
    assert "computed by" in why or "has a hook" in why
    assert "remove" in why


def test_what_the_refusal_of_a_parametrisation_asks_for_unblocks_it() -> None:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4))
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    folded(model, 2, 3, 6, 6)


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize("path", ["0", "1"])
def test_hooks_on_layer_and_norm_are_refused(path: str, hook: str) -> None:
    model = _pair()
    getattr(model.get_submodule(path), f"register_{hook}_hook")(lambda *given: None)
    assert f"{path} has a hook" in reasons(model, 2, 3, 6, 6)["1"]


def test_a_hook_on_a_module_around_the_layer_is_refused() -> None:
    model = redrawn(nn.Sequential(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)))
    model[0].register_forward_hook(lambda *given: None)
    assert "0 has a hook" in reasons(model, 2, 3, 6, 6)["1"]


def test_a_hook_elsewhere_does_not_matter() -> None:
    model = nn.Sequential(*_pair(), nn.ReLU())
    model[2].register_forward_hook(lambda *given: None)
    folded(model, 2, 3, 6, 6)


class _Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.conv(x)
        return y, self.norm(y)


def test_a_value_that_the_model_returns_is_not_changed() -> None:
    made = plan("fold-batch-norm", redrawn(_Returned()), torch.randn(2, 3, 6, 6).double())
    assert not made.changes
    assert "the model returns what conv2d makes" in str(made.refused[0])


class _Functional(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class _Learned(nn.BatchNorm2d):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.act = nn.PReLU()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(input))


@pytest.mark.parametrize(
    ("make", "why"),
    [(_Functional, "1 computes more than the norm: relu"), (_Learned, "its activation has parameters")],
)
def test_an_activation_that_cannot_stay_alone_keeps_its_norm(make: Callable[[int], nn.Module], why: str) -> None:
    assert why in reasons(redrawn(nn.Sequential(nn.Conv2d(3, 4, 3), make(4))), 2, 3, 6, 6)["1"]


class _Deaf(nn.Conv2d):
    """A layer whose forward has no use for a bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(input, self.weight)


def test_no_bias_is_given_to_a_layer_that_would_ignore_it() -> None:
    model = redrawn(nn.Sequential(_Deaf(3, 4, 3, bias=False), nn.BatchNorm2d(4)))
    assert "0 takes no bias" in reasons(model, 2, 3, 6, 6)["1"]


@pytest.mark.parametrize(
    ("number", "why"), [(-0.5, "a running variance plus eps is -0.5"), (float("nan"), "must be positive")]
)
def test_statistics_that_no_data_could_leave_are_refused(number: float, why: str) -> None:
    model = _pair()
    model[1].running_var[2] = number
    made = plan("fold-batch-norm", model, torch.randn(2, 3, 6, 6).double())
    assert not made.changes
    assert why in str(made.refused[0])


def test_gains_that_are_not_finite_are_refused() -> None:
    model = _pair()
    model[1].weight.data[0] = float("inf")
    made = plan("fold-batch-norm", model, torch.randn(2, 3, 6, 6).double())
    assert "not all finite" in str(made.refused[0])


def test_a_norm_that_did_not_run_is_named() -> None:
    model = nn.Sequential(*_pair())
    model[0].spare = nn.BatchNorm2d(4)
    made = plan("fold-batch-norm", model, torch.randn(2, 3, 6, 6).double())
    assert [change.path for change in made.changes] == ["1"]
    assert "0.spare: it holds running statistics, but did not run" in str(made.refused[0])


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Identity()])
def test_a_model_without_batch_norms_has_nothing_to_fold(norm: nn.Module) -> None:
    made = plan("fold-batch-norm", nn.Sequential(nn.Conv2d(3, 4, 3), norm).eval(), torch.randn(2, 3, 6, 6))
    assert not made.changes
    assert "nothing to fold" in str(made.refused[0])
