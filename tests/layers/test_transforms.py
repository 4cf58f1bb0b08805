"""What torch does to functions, done to every layer: derivatives of all kinds, torch.func and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.gradcheck import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

from normwise import layers
from tests.layers.layer_cases import BY_LAYER, CASES, Case, Tensors, cubes, outputs, randomized

# torch's own rules for forward mode are still written in TorchScript
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_layer = pytest.mark.parametrize("case", BY_LAYER.values(), ids=BY_LAYER)

# Each case as it trains, and as it is used where that is another function.
MODES = [(name, mode) for name, case in CASES.items() for mode in (("train", "eval") if case.two_modes else ("train",))]
every_mode = pytest.mark.parametrize(("name", "mode"), MODES, ids=[f"{name}-{mode}" for name, mode in MODES])


def made(name: str, mode: str) -> tuple[Case, nn.Module]:
    return CASES[name], randomized(CASES[name].make()).train(mode == "train")


def as_function(case: Case, module: nn.Module, inputs: Tensors) -> tuple[Callable[..., Any], Tensors]:
    """Return the layer as a function of its inputs and parameters, and where to take it."""
    names = [name for name, _ in module.named_parameters()]
    operands = case.operands(len(inputs[0]))

    def function(*tensors: torch.Tensor) -> Any:
        given, parameters = tensors[: len(inputs)], dict(zip(names, tensors[len(inputs) :], strict=True))
        return functional_call(module, parameters, given, operands)

    point = [each.clone().requires_grad_() for each in (*inputs, *module.parameters())]
    return function, tuple(point)


# -- derivatives ------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["one-direction", "jacobian"])
@every_mode
def test_first_derivatives(name: str, mode: str, fast: bool) -> None:
    case, module = made(name, mode)
    function, point = as_function(case, module, case.inputs(2))
    assert gradcheck(
        function,
        point,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        fast_mode=fast,
    )


@every_mode
def test_second_derivatives(name: str, mode: str) -> None:
    case, module = made(name, mode)
    function, point = as_function(case, module, case.inputs(2))
    assert gradgradcheck(
        function, point, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True, fast_mode=True
    )


def shifted(result: torch.Tensor | Tensors) -> Tensors:
    """Add numbers that give every output of a constant input another gradient, none of them 0."""
    return tuple(y + torch.linspace(1, 2, y.numel(), dtype=y.dtype).view_as(y) for y in outputs(result))


@pytest.mark.parametrize("value", [0.0, 2.0], ids=["zeros", "constant"])
@every_mode
def test_derivatives_of_constant_inputs_are_finite(name: str, mode: str, value: float) -> None:
    case, module = made(name, mode)
    constant = tuple(torch.full_like(each, value) for each in case.inputs(2))
    function, point = as_function(case, module, constant)
    first = torch.autograd.grad(cubes(shifted(function(*point))), point, create_graph=True)
    assert all(each.isfinite().all() for each in first)
    second = torch.autograd.grad(cubes(first), point, allow_unused=True)
    assert all(each.isfinite().all() for each in second if each is not None)


# -- torch.func -------------------------------------------------------------------------------


def evaluated(name: str) -> nn.Module:
    return randomized(CASES[name].make()).eval()


def of_sample(module: nn.Module, inputs: Tensors, operands: dict[str, torch.Tensor]) -> Tensors:
    """Return the outputs for one sample, without its batch axis."""
    alone = {name: each[None] for name, each in operands.items()}
    return tuple(y[0] for y in outputs(module(*(each[None] for each in inputs), **alone)))


def sample(values: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    return {name: each[index] for name, each in values.items()}


@pytest.mark.parametrize("name", CASES)
def test_mapped_over_samples(name: str) -> None:
    module, inputs, operands = evaluated(name), CASES[name].inputs(3), CASES[name].operands(3)
    mapped = vmap(lambda operands, *each: of_sample(module, each, operands))(operands, *inputs)
    one_by_one = [of_sample(module, tuple(each[i] for each in inputs), sample(operands, i)) for i in range(3)]
    for found, expected in zip(mapped, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in CASES if list(CASES[name].make().parameters())])
def test_gradients_of_each_sample(name: str) -> None:
    module, inputs, operands = evaluated(name), CASES[name].inputs(3), CASES[name].operands(3)
    parameters = {name: each.detach() for name, each in module.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], operands: dict[str, torch.Tensor], *inputs: torch.Tensor) -> Any:
        alone = {name: each[None] for name, each in operands.items()}
        result = functional_call(module, parameters, tuple(each[None] for each in inputs), alone)
        return cubes(result)

    found = vmap(grad(loss), in_dims=(None, 0, *[0] * len(inputs)))(parameters, operands, *inputs)
    for index in range(3):
        module.zero_grad()
        cubes(of_sample(module, tuple(each[index] for each in inputs), sample(operands, index))).backward()
        for parameter, each in module.named_parameters():
            torch.testing.assert_close(found[parameter][index], each.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_jacobians_forwards_and_backwards(name: str) -> None:
    module, inputs, operands = evaluated(name), CASES[name].inputs(2), CASES[name].operands(2)

    def first(x: torch.Tensor) -> torch.Tensor:
        return outputs(module(x, *inputs[1:], **operands))[0]

    direction = torch.linspace(-1, 2, inputs[0].numel(), dtype=torch.float64).view_as(inputs[0])
    backwards, forwards = jacrev(first)(inputs[0]), jacfwd(first)(inputs[0])
    torch.testing.assert_close(backwards, forwards, rtol=1e-11, atol=1e-12)
    pushed = torch.tensordot(backwards, direction, direction.ndim)
    torch.testing.assert_close(jvp(first, (inputs[0],), (direction,))[1], pushed, rtol=1e-11, atol=1e-12)


def test_running_statistics_are_not_moved_behind_the_back_of_torch_func() -> None:
    module, x = randomized(CASES["BatchNorm2d"].make()), CASES["BatchNorm2d"].inputs(3)[0]
    before = {name: each.clone() for name, each in module.named_buffers() if each.is_floating_point()}
    parameters = dict(module.named_parameters())
    with pytest.raises(RuntimeError, match="in-place operation"):
        grad(lambda parameters: functional_call(module, parameters, (x,)).sum())(parameters)
    with pytest.raises(RuntimeError, match="vmap: inplace arithmetic"):
        vmap(lambda x: module(x[None]))(x)
    assert all(torch.equal(dict(module.named_buffers())[name], each) for name, each in before.items())


def test_running_statistics_given_as_arguments_move_under_grad_and_under_vmap() -> None:
    module, x = randomized(CASES["BatchNorm2d"].make()), CASES["BatchNorm2d"].inputs(3)[0]
    parameters = {name: each.detach() for name, each in module.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], kept: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, (parameters, kept), (x,)).pow(3).sum()

    kept = {name: each.clone() for name, each in module.named_buffers()}
    found = grad(loss)(parameters, kept, x)
    each_kept = {name: torch.stack([each] * 3) for name, each in module.named_buffers()}
    vmap(grad(loss), in_dims=(None, 0, 0))(parameters, each_kept, x[:, None])
    alone = [randomized(CASES["BatchNorm2d"].make()) for _ in range(3)]
    for index, other in enumerate(alone):
        other(x[index : index + 1])
    module(x).pow(3).sum().backward()
    for name, each in module.named_parameters():
        torch.testing.assert_close(found[name], each.grad, rtol=1e-12, atol=1e-12)
    for name, each in module.named_buffers():
        torch.testing.assert_close(kept[name], each, rtol=1e-14, atol=1e-14)
        expected = torch.stack([dict(other.named_buffers())[name] for other in alone])
        torch.testing.assert_close(each_kept[name], expected, rtol=1e-14, atol=1e-14)


def test_a_dual_number_leaves_no_tangent_in_running_statistics() -> None:
    module, x = randomized(CASES["BatchNorm2d"].make()), CASES["BatchNorm2d"].inputs(3)[0]
    with torch.autograd.forward_ad.dual_level():
        y = module(torch.autograd.forward_ad.make_dual(x, x.cos()))
        assert torch.autograd.forward_ad.unpack_dual(y).tangent is not None
        tangents = [torch.autograd.forward_ad.unpack_dual(each).tangent for each in module.buffers()]
    assert tangents == [None, None, None]


# -- autocast ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_layer
def test_autocast_changes_nothing(case: Case, dtype: torch.dtype) -> None:
    module = randomized(case.make(dtype))
    inputs = [each.to(dtype).requires_grad_() for each in case.inputs(3)]
    plain = outputs(module(*inputs))
    expected = torch.autograd.grad(cubes(plain), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = outputs(module(*inputs))
    gradients = torch.autograd.grad(cubes(found), inputs)
    if isinstance(module, layers.AdaLayerNorm | layers.AdaRMSNorm) and dtype is torch.float32:
        # the Linear inside follows autocast as any Linear: its output is rounded to bfloat16
        assert [y.dtype for y in found] == [dtype]
        torch.testing.assert_close(found[0], plain[0], rtol=2**-6, atol=2**-6)
        return
    for y, right in zip((*found, *gradients), (*plain, *expected), strict=True):
        assert y.dtype is dtype
        assert torch.equal(y, right)
