"""Every sample that torch tests its norm functions on, through the functions of the same meaning here.

torch's ``op_db`` gives inputs with parameters, eps, momentum and running statistics. Values, first gradients with
a random upstream gradient and moved running statistics are compared in four dtypes; forward-mode derivatives and
finite differences in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from normwise import functional as F
from normwise import kernels
from normwise.functional.batch import BATCH, batch_spec
from normwise.functional.group import group_spec
from normwise.functional.hidden import LAYER, trailing
from normwise.spec import NormSpec
from tests.nearness import worse
from tests.torch_samples import functions

SAMPLES = {
    "nn.functional.layer_norm": 6,
    "native_layer_norm": 20,
    "nn.functional.rms_norm": 6,
    "nn.functional.group_norm": 33,
    "native_group_norm": 33,
    "nn.functional.batch_norm": 12,
    "native_batch_norm": 10,
    "_native_batch_norm_legit": 10,
    "_batch_norm_with_update": 9,
    "nn.functional.instance_norm": 9,
    "nn.functional.normalize": 8,
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Samples that torch computes and we refuse, see ``why_refused``.
REFUSED = {
    "nn.functional.layer_norm": 1,
    "native_layer_norm": 4,
    "nn.functional.rms_norm": 1,
    "nn.functional.group_norm": 4,
    "native_group_norm": 4,
    "nn.functional.batch_norm": 2,
    "nn.functional.normalize": 3,
}

named = pytest.mark.parametrize("name", SAMPLES)
Tensor = torch.Tensor
Outputs = tuple[Tensor, ...]
Function = Callable[..., Tensor | Outputs]


def with_moments(y: Tensor, spec: NormSpec, x: Tensor, eps: float) -> Outputs:
    """Return what torch's native functions return: output, mean, reciprocal root."""
    found = kernels.moments(spec, x)
    assert found.mean is not None
    return y, found.mean, (found.statistic + eps).rsqrt()


def native_layer_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Outputs:
    y = F.layer_norm(x, shape, weight, bias, eps)
    return with_moments(y, NormSpec(axes=trailing(shape), center=True, statistic=LAYER.statistic), x, eps)


def native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, positions: int, groups: int, eps: float
) -> Outputs:
    return with_moments(F.group_norm(x, groups, weight, bias, eps), group_spec(groups, eps, x.ndim), x, eps)


def native_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Outputs:
    mean, var, training, momentum, eps = rest if len(rest) == 5 else (None, None, *rest)
    y = F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    return with_moments(y, batch_spec(BATCH, x.ndim, 1), x, eps) if training else (y,)


def batch_norm_with_update(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> Outputs:
    return native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    return F.lp_norm(x, p, dim, eps)


OURS: dict[str, Function] = {
    "nn.functional.layer_norm": F.layer_norm,
    "native_layer_norm": native_layer_norm,
    "nn.functional.rms_norm": F.rms_norm,
    "nn.functional.group_norm": F.group_norm,
    "native_group_norm": native_group_norm,
    "nn.functional.batch_norm": F.batch_norm,
    "native_batch_norm": native_batch_norm,
    "_native_batch_norm_legit": native_batch_norm,
    "_batch_norm_with_update": batch_norm_with_update,
    "nn.functional.instance_norm": F.instance_norm,
    "nn.functional.normalize": normalize,
}


@pytest.fixture(scope="module")
def operators() -> dict[str, Any]:
    return functions()


def samples(op: Any, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    return list(op.reference_inputs("cpu", dtype, requires_grad=True))


class Call:
    """The arguments of one sample in a dtype, and what a function makes of them."""

    def __init__(self, sample: Any, dtype: torch.dtype) -> None:
        self.tensors: list[Tensor] = []
        self.dtype = dtype
        self.arguments = [self._own(each) for each in (sample.input, *sample.args)]
        self.options = {name: self._own(each) for name, each in sample.kwargs.items()}

    def _own(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        self.tensors.append(value.detach().clone().to(self.dtype).requires_grad_(value.requires_grad))
        return self.tensors[-1]

    def outputs(self, function: Function) -> Outputs:
        found = function(*self.arguments, **self.options)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    def results(self, function: Function) -> dict[str, Tensor]:
        """Return outputs, gradients of the first one, and the tensors that take none as the call left them."""
        y, *more = self.outputs(function)
        leaves = [each for each in self.tensors if each.requires_grad]
        torch.manual_seed(1)
        upstream = torch.randn(y.shape, dtype=torch.float64).to(y.dtype)
        gradients = torch.autograd.grad(y, leaves, upstream)
        running = [each for each in self.tensors if not each.requires_grad]
        kinds = {"moment": more, "gradient": gradients, "running": running}
        named = {f"{kind} {n}": each.detach() for kind, group in kinds.items() for n, each in enumerate(group)}
        return {"y": y.detach(), **named}


def why_refused(sample: Any) -> str | None:
    """Return why we do not serve what torch computes here, or None."""
    numbers = [each for each in (*sample.args, sample.kwargs.get("eps")) if isinstance(each, float)]
    if sample.kwargs.get("eps", numbers[-1] if numbers else 0.0) < 0:
        return "a negative eps, whose root may be of a negative number"
    if sample.kwargs.get("p", 2.0) <= 0:
        return "p of 0 or less, which is not a norm"
    if sample.input.ndim < 2 and "training" in sample.kwargs:
        return "a batch norm of an input without a channel axis"
    return "no axis to normalize" if sample.input.ndim == 0 else None


def served(op: Any, dtype: torch.dtype = torch.float64) -> list[Any]:
    return [sample for sample in samples(op, dtype) if why_refused(sample) is None]


def differences(ours: Function, theirs: Function, sample: Any, dtype: torch.dtype) -> list[str]:
    wanted, truth = Call(sample, dtype).results(theirs), Call(sample, torch.float64).results(theirs)
    found = Call(sample, dtype).results(ours)
    found = {key: each.reshape(wanted[key].shape).to(wanted[key].dtype) for key, each in found.items()}
    return worse(found, {key: wanted[key] for key in found}, {key: truth[key] for key in found})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@named
def test_values_gradients_and_statistics_are_as_near_to_float64_as_those_of_torch(
    operators: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    op, told = operators[name], []
    for number, sample in enumerate(served(op, dtype)):
        told += [f"{number}: {each}" for each in differences(OURS[name], op.op, sample, dtype)]
    assert told == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["nn.functional.layer_norm", "native_layer_norm", "nn.functional.rms_norm"])
def test_outputs_over_hidden_axes_equal_those_of_torch_to_the_bit(
    operators: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    for sample in served(operators[name], dtype):
        if math.prod(sample.args[0]) == 1 and dtype.itemsize == 2:
            continue  # of one element torch returns rounding instead of 0, see ``torch_differences``
        ours, theirs = (Call(sample, dtype).outputs(each)[0] for each in (OURS[name], operators[name].op))
        assert torch.equal(ours, theirs)


@named
def test_second_derivatives_are_those_of_torch(operators: dict[str, Any], name: str) -> None:
    for sample in served(operators[name]):
        theirs = with_unit_gain if name == "native_layer_norm" and sample.args[1] is None else operators[name].op
        ours, theirs = (curvature(each, sample) for each in (OURS[name], theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def with_unit_gain(x: Tensor, shape: tuple[int, ...], weight: None, bias: Tensor | None, eps: float) -> Outputs:
    """Return torch's layer norm with a gain of ones, where torch cannot differentiate a shift alone twice."""
    return torch.native_layer_norm(x, shape, torch.ones(shape, dtype=x.dtype), bias, eps)


def curvature(function: Function, sample: Any) -> Outputs:
    """Return the derivatives of a direction of the first gradients, by the same tensors and the upstream gradient."""
    call = Call(sample, torch.float64)
    leaves = [each for each in call.tensors if each.requires_grad]
    y = call.outputs(function)[0]
    torch.manual_seed(3)
    upstream = torch.randn_like(y).requires_grad_()
    first = torch.autograd.grad(y, leaves, upstream, create_graph=True)
    wanted, along = [*leaves, upstream], [torch.randn_like(each) for each in first]
    found = torch.autograd.grad(first, wanted, along, allow_unused=True)
    return tuple(torch.zeros_like(at) if each is None else each for at, each in zip(wanted, found, strict=True))


@named
def test_what_is_not_served_is_refused(operators: dict[str, Any], name: str) -> None:
    all_of_them = samples(operators[name], torch.float64)
    refused = [sample for sample in all_of_them if why_refused(sample)]
    assert (len(all_of_them), len(refused)) == (SAMPLES[name], REFUSED.get(name, 0))
    for sample in refused:
        with pytest.raises(ValueError, match=r"eps=-0.5 must be a finite number, 0 or more|given"):
            Call(sample, torch.float64).outputs(OURS[name])


def test_the_samples_are_counted() -> None:
    assert (sum(SAMPLES.values()), sum(REFUSED.values())) == (156, 19)


@pytest.mark.parametrize("name", ["native_layer_norm", "nn.functional.rms_norm", "nn.functional.group_norm"])
def test_bad_input_of_torchs_list_is_refused_as_a_bad_value(operators: dict[str, Any], name: str) -> None:
    bad = list(operators[name].error_inputs("cpu"))
    assert len(bad) == {"native_layer_norm": 4, "nn.functional.rms_norm": 3, "nn.functional.group_norm": 2}[name]
    for each in bad:
        with pytest.raises(ValueError, match=r"given|into num_groups=2"):
            Call(each.sample_input, torch.float32).outputs(OURS[name])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", ["nn.functional.rms_norm", "nn.functional.normalize"])
def test_complex_numbers_that_torch_takes_are_refused(operators: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    for sample in served(operators[name], dtype):
        with pytest.raises(TypeError, match=r"needs a floating point input, given torch\.complex"):
            Call(sample, dtype).outputs(OURS[name])


def tangent(function: Function, sample: Any) -> tuple[Tensor, Tensor]:
    """Return the output and its forward-mode derivative along random directions."""
    call = Call(sample, torch.float64)
    torch.manual_seed(2)
    with forward_ad.dual_level():
        duals = {
            id(each): forward_ad.make_dual(each.detach(), torch.randn_like(each))
            for each in call.tensors
            if each.requires_grad
        }
        call.arguments = [duals.get(id(each), each) for each in call.arguments]
        call.options = {name: duals.get(id(each), each) for name, each in call.options.items()}
        y = forward_ad.unpack_dual(call.outputs(function)[0])
        running = [each for each in call.tensors if not each.requires_grad]
        assert all(forward_ad.unpack_dual(each).tangent is None for each in running)
        assert y.tangent is not None
        return y.primal.clone(), y.tangent.clone()


# Forward-mode AD compiles torch's own decompositions on first use, with a call that torch says it will drop.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in SAMPLES if name.startswith("nn.")])
def test_forward_mode_derivatives_are_those_of_torch(operators: dict[str, Any], name: str) -> None:
    for sample in served(operators[name]):
        if sample.input.numel():
            ours, theirs = tangent(OURS[name], sample), tangent(operators[name].op, sample)
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in SAMPLES if name.startswith("nn.")])
def test_derivatives_agree_with_finite_differences(operators: dict[str, Any], name: str) -> None:
    for sample in served(operators[name]):
        if 0 < sample.input.numel() <= 30:
            call = Call(sample, torch.float64)
            leaves = [each for each in call.tensors if each.requires_grad]
            compute = freed(call, OURS[name], leaves)
            assert torch.autograd.gradcheck(compute, leaves, check_forward_ad=True)


def freed(call: Call, function: Function, leaves: list[Tensor]) -> Callable[..., Tensor]:
    """Return the call as a function of its differentiable tensors."""

    def compute(*values: Tensor) -> Tensor:
        place = {id(leaf): value for leaf, value in zip(leaves, values, strict=True)}
        arguments = [place.get(id(each), each) for each in call.arguments]
        found = function(*arguments, **{name: place.get(id(each), each) for name, each in call.options.items()})
        return found if isinstance(found, Tensor) else found[0]

    return compute


# bfloat16, whose roundings hide the most, stands for the others
@pytest.mark.parametrize(
    "dtype", [pytest.param(t, marks=() if t is torch.bfloat16 else pytest.mark.slow) for t in DTYPES], ids=str
)
@named
def test_a_function_that_is_a_little_wrong_is_seen(operators: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    def wrong(*arguments: Any, **options: Any) -> Outputs:
        found = OURS[name](*arguments, **options)
        first, *rest = (found,) if isinstance(found, Tensor) else found
        return first * 1.03, *rest

    seen = [differences(wrong, operators[name].op, sample, dtype) for sample in served(operators[name], dtype)]
    assert sum(map(bool, seen)) > len(seen) / 2
