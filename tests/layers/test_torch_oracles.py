"""Every forward sample that torch tests its own norms on, through the layers of the same name here.

torch's ``module_db`` has 63 samples for nine norms: with and without parameters, with and without running
statistics, momentum None, several shapes, an empty batch, no batch axis. Each runs in four dtypes, in training
and in evaluation, three steps in a row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from normwise import layers
from tests.nearness import worse
from tests.torch_samples import modules

SAMPLES = {
    "BatchNorm1d": 8,
    "BatchNorm2d": 7,
    "BatchNorm3d": 7,
    "GroupNorm": 10,
    "InstanceNorm1d": 6,
    "InstanceNorm2d": 6,
    "InstanceNorm3d": 6,
    "LayerNorm": 7,
    "RMSNorm": 6,
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STEPS = 3

named = pytest.mark.parametrize("name", SAMPLES)
in_each_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


@pytest.fixture(scope="module")
def infos() -> dict[str, Any]:
    return modules()


def samples(info: Any, training: bool) -> list[Any]:
    torch.manual_seed(0)
    return info.module_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=training)


def randomize(module: nn.Module) -> nn.Module:
    """Return the module with parameters and statistics of a layer that has been trained."""
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            if value.is_floating_point():
                value.copy_(torch.rand_like(value) + 0.5)
    return module


class Twins:
    """torch's layer, ours with its state, and the float64 version of torch's as the truth."""

    def __init__(self, name: str, sample: Any, dtype: torch.dtype, training: bool) -> None:
        arguments, options = sample.constructor_input.args, sample.constructor_input.kwargs
        self.theirs = randomize(getattr(nn, name)(*arguments, **options, dtype=dtype)).train(training)
        self.truth = copy.deepcopy(self.theirs).double()
        self.ours = getattr(layers, name)(*arguments, **options, dtype=dtype).train(training)
        self.ours.load_state_dict(self.theirs.state_dict(), strict=True)
        self.x = sample.forward_input.args[0].to(dtype)

    def all(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.ours, self.theirs, self.truth


def pass_through(module: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return output, gradients and state after one pass, in the dtype of the module."""
    dtype = next(iter(value.dtype for value in module.state_dict().values() if value.is_floating_point()), None)
    wide = dtype is torch.float64 or upstream.dtype is torch.float64
    x = (x.double() if wide else x).detach().requires_grad_()
    y = module(x)
    wanted = {"x": x, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(y, list(wanted.values()), upstream.to(y.dtype))
    found = {"y": y.detach(), **{f"d{name}": each for name, each in zip(wanted, gradients, strict=True)}}
    return found | {name: value.clone() for name, value in module.state_dict().items()}


def counted(name: str, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what is compared: torch's instance norms forget to count, see ``torch_differences``."""
    return {key: found[key] for key in found if not (name.startswith("Instance") and key == "num_batches_tracked")}


def passes(twins: Twins) -> Iterator[tuple[dict[str, torch.Tensor], ...]]:
    """Run the three layers side by side on three batches, with random upstream gradients."""
    for step in range(STEPS):
        x = (twins.x * (1 + step) + step).to(twins.x.dtype)
        upstream = torch.randn(x.shape, dtype=torch.float64).to(x.dtype)
        wide = upstream.double()
        yield (
            pass_through(twins.ours, x, upstream),
            pass_through(twins.theirs, x, upstream),
            pass_through(twins.truth, x, wide),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@in_each_mode
@named
def test_outputs_gradients_and_state_are_as_near_to_float64_as_those_of_torch(
    infos: dict[str, Any], name: str, training: bool, dtype: torch.dtype
) -> None:
    told: list[str] = []
    for number, sample in enumerate(samples(infos[name], training)):
        for step, found in enumerate(passes(Twins(name, sample, dtype, training))):
            compared = (counted(name, each) for each in found)
            told += [f"{number} {sample.desc} step {step}: {each}" for each in worse(*compared)]
    assert told == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_outputs_over_hidden_axes_equal_those_of_torch_to_the_bit(
    infos: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    for sample in samples(infos[name], True):
        for ours, theirs, _ in passes(Twins(name, sample, dtype, True)):
            assert torch.equal(ours["y"], theirs["y"])


@named
def test_no_sample_is_left_out(infos: dict[str, Any], name: str) -> None:
    assert [len(samples(infos[name], training)) for training in (True, False)] == [SAMPLES[name]] * 2
    assert sum(SAMPLES.values()) == 63


@in_each_mode
@named
def test_second_derivatives_are_those_of_torch(infos: dict[str, Any], name: str, training: bool) -> None:
    for sample in samples(infos[name], training):
        twins = Twins(name, sample, torch.float64, training)
        if twins.x.numel():
            along = [torch.randn_like(twins.x) for _ in range(2)]
            for ours, theirs in zip(*(curvature(each, twins.x, *along) for each in twins.all()[:2]), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def curvature(
    module: nn.Module, x: torch.Tensor, upstream: torch.Tensor, direction: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the derivatives of a direction of the input gradient, by input, parameters and upstream gradient."""
    x, upstream = x.clone().requires_grad_(), upstream.clone().requires_grad_()
    (first,) = torch.autograd.grad(module(x), x, upstream, create_graph=True)
    wanted = [x, upstream, *(each for name, each in module.named_parameters() if name == "weight")]
    found = torch.autograd.grad((first * direction).sum(), wanted, allow_unused=True)
    return tuple(torch.zeros_like(at) if each is None else each for at, each in zip(wanted, found, strict=True))


def version_of(state: object) -> dict[str, int]:
    return getattr(state, "_metadata")[""]  # noqa: B009 - not in the type of a dictionary


@named
def test_the_state_dict_loads_both_ways(infos: dict[str, Any], name: str) -> None:
    for sample in samples(infos[name], True):
        twins = Twins(name, sample, torch.float32, True)
        state = randomize(twins.ours).state_dict()
        assert list(state) == list(twins.theirs.state_dict())
        assert version_of(state) == version_of(twins.theirs.state_dict())
        twins.theirs.load_state_dict(state, strict=True)
        assert all(torch.equal(value, state[key]) for key, value in twins.theirs.state_dict().items())


@named
def test_new_layers_hold_what_those_of_torch_hold(infos: dict[str, Any], name: str) -> None:
    for sample in samples(infos[name], True):
        made = sample.constructor_input
        ours, theirs = (getattr(home, name)(*made.args, **made.kwargs) for home in (layers, nn))
        assert {key: str(value) for key, value in ours.state_dict().items()} == {
            key: str(value) for key, value in theirs.state_dict().items()
        }


def refused(info: Any, name: str, home: Any) -> list[type[Exception] | None]:
    """Return what each bad input of torch's list raises, or None where it is served."""
    found = []
    for bad in info.module_error_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=True):
        made, given = bad.module_error_input.constructor_input, bad.module_error_input.forward_input
        try:
            getattr(home, name)(*made.args, **made.kwargs, dtype=torch.float64)(*given.args)
        except (ValueError, RuntimeError, TypeError) as error:
            found.append(type(error))
        else:
            found.append(None)
    return found


def test_bad_input_raises_what_torch_raises(infos: dict[str, Any]) -> None:
    assert refused(infos["GroupNorm"], "GroupNorm", layers) == refused(infos["GroupNorm"], "GroupNorm", nn)
    assert [name for name in SAMPLES if infos[name].module_error_inputs_func] == [
        *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm")
    ]


@pytest.mark.parametrize("name", ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"])
def test_a_negative_eps_is_refused_as_in_torch_and_eps_0_is_served(infos: dict[str, Any], name: str) -> None:
    assert refused(infos[name], name, nn) == [ValueError, ValueError]  # eps = -1, eps = 0
    assert refused(infos[name], name, layers) == [ValueError, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("attribute", "factor"), [("eps", 1000.0), ("momentum", 0.9)])
def test_a_layer_that_is_a_little_wrong_is_seen(
    infos: dict[str, Any], dtype: torch.dtype, attribute: str, factor: float
) -> None:
    twins = Twins("BatchNorm2d", samples(infos["BatchNorm2d"], True)[2], dtype, True)
    twins.ours = copy.deepcopy(twins.theirs)
    setattr(twins.ours, attribute, getattr(twins.ours, attribute) * factor)
    assert any(worse(*found) for found in passes(twins))
