"""The compiled kernels of rows under everything that PyTorch does to operators."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.gradcheck import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from normwise import functional as nf
from normwise import kernels, layers
from normwise.kernels import _calls
from normwise.kernels._ops import ops
from normwise.spec import NormSpec
from normwise.spec.definition import plain
from tests.kernels.cpu_cases import SPECS, numbers, parameters

pytestmark = [
    pytest.mark.skipif(kernels.cpu.unavailable() is not None, reason=str(kernels.cpu.unavailable())),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *HALF)
CODES = {"rms": 0, "layer": 1, "torch layer": 2, "l2, eps outside": 3 + 32 + 128, "clamp": 64 + 128, "promoted": 12}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


def of_spec(spec: NormSpec) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias: kernels.cpu.forward(spec, x, weight, bias)


def taken(spec: NormSpec, *tensors: torch.Tensor | None) -> bool:
    return kernels.cpu.refusal(spec, *tensors, None) is None


# -- operators ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_operators_keep_the_dispatchers_rules(code: int, dtype: torch.dtype) -> None:
    x, dy = numbers(3, 5, 8, dtype=dtype), numbers(3, 5, 8, seed=3, dtype=dtype)
    for weight, shift in (None, None), (8, None), (8, 8):
        gain, bias = (None if each is None else numbers(each, seed=1, dtype=dtype) for each in (weight, shift))
        # tracing takes a second each: one dtype, one set of operands
        traced = ("test_aot_dispatch_dynamic",) if shift and dtype is torch.bfloat16 else ()
        plan = (8, code, 1e-5, 0.5)
        y, stats = ops.norm_rows_saving.default(x, gain, bias, *plan)
        for op, told in {
            ops.norm_rows: (x, gain, bias, *plan),
            ops.norm_rows_saving: (x, gain, bias, *plan),
            ops.add_norm_rows: (x, dy, gain, bias, *plan, True),
            ops.norm_rows_backward: (dy.to(y.dtype), dy if shift else None, x, stats, gain, *plan, 7),
        }.items():
            torch.library.opcheck(op.default, told, test_utils=("test_schema", "test_faketensor", *traced))


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (8,), (0, 8), (2, 0, 8), (2, 4, 2), (3, 1)], ids=str)
def test_fake_kernels_return_what_the_real_ones_do(shape: tuple[int, ...]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    size = 1 if shape[-1] == 1 else 8
    for dtype, held, code in product(DTYPES, (None, torch.float32), (0, 1, 8)):
        held = dtype if dtype is torch.float64 and held is not None else held
        made = [numbers(*shape, dtype=dtype), None if held is None else numbers(size, dtype=held)]
        if len(shape) > 1:
            made[0] = made[0].transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous
        mode = FakeTensorMode()
        fakes = [None if each is None else mode.from_tensor(each) for each in made]
        with mode:
            found = run_all(*fakes, size, code)
        for fake, real in zip(found, run_all(*made, size, code), strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def run_all(x: torch.Tensor, weight: torch.Tensor | None, size: int, code: int) -> list[torch.Tensor]:
    """Return everything that the four operators return."""
    y, stats = ops.norm_rows_saving.default(x, weight, None, size, code, 1e-5, 0.0)
    found = [ops.norm_rows.default(x, weight, None, size, code, 1e-5, 0.0), y, stats]
    for needs in range(8):
        found += ops.norm_rows_backward.default(y, None, x, stats, weight, size, code, 1e-5, 0.0, needs)
    for wide in (False, True):
        found += ops.add_norm_rows.default(x, x, weight, None, size, code & 3, 1e-5, 0.0, wide)
    return found


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_vmap_of_the_operators_is_a_loop(code: int) -> None:
    x, many, weights = numbers(4, 3, 8), numbers(3, 8, 4, seed=1), numbers(8, 4, seed=2)
    plan = (8, code, 1e-5, 0.0)

    def all_of(x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        y, stats = ops.norm_rows_saving.default(x, weight, None, *plan)
        dx = ops.norm_rows_backward.default(other, other, x, stats, weight, *plan, 1)[0]
        gradients = ops.norm_rows_backward.default(other, None, x, stats, weight, *plan, 3)[:2]
        once = ops.norm_rows.default(x, weight, None, *plan)
        return y, stats, dx, *gradients, once, *ops.add_norm_rows.default(x, other, weight, None, *plan, False)

    for dims in (0, 2, None), (None, 2, None), (0, None, None), (0, 2, 1), (None, None, 1):
        arguments = (x if dims[0] == 0 else x[0], many if dims[1] == 2 else many[..., 0], weights)
        arguments = (*arguments[:2], weights if dims[2] == 1 else weights[:, 0])
        pairs = list(zip(arguments, dims, strict=True))
        one_by_one = [all_of(*(a if d is None else a.select(d, i) for a, d in pairs)) for i in range(4)]
        together = vmap(all_of, in_dims=dims)(*arguments)
        for found, expected in zip(together, zip(*one_by_one, strict=True), strict=True):
            torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)


# -- torch.compile ------------------------------------------------------------------------------------


@each_spec
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_with_dynamic_shapes_and_gradients(spec: NormSpec, backend: str) -> None:
    graphs = CompileCounterWithBackend(backend)
    function = compiled(of_spec(spec), backend=graphs)
    counted = []
    for batch in (3, 5, 7):
        x = numbers(batch, 6, 16, seed=batch).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        own = [None if each is None else each.requires_grad_() for each in parameters(spec, (6, 16))]
        leaves = [each for each in (x, *own) if each is not None]
        assert taken(spec, x, *own)
        found, expected = function(x, *own), of_spec(spec)(x, *own)
        assert torch.equal(found, expected)
        upstream = numbers(*found.shape, seed=9)
        for ours, right in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (found, expected)), strict=True):
            assert torch.equal(ours, right)
        counted.append(graphs.frame_count)
    assert counted == counted[:1] * 3  # none for another batch size
    assert called_in(graphs) & {"norm", "norm_rows"}


@pytest.mark.parametrize("make", [layers.RMSNorm, layers.LayerNorm])
def test_compiles_for_any_width(make: Callable[..., nn.Module]) -> None:
    function = {layers.RMSNorm: nf.rms_norm, layers.LayerNorm: nf.layer_norm}[make]
    anything = compiled(lambda x: function(x, x.shape[-1:]), backend="aot_eager", dynamic=True)
    for shape in (4, 6), (7, 8), (3, 16):
        x = numbers(*shape, dtype=torch.float32)
        assert torch.equal(anything(x), make(shape[-1])(x))


def called_in(graphs: CompileCounterWithBackend) -> set[str]:
    """Return which of our operators are in the graphs."""
    targets = [str(node.target) for graph in graphs.graphs for node in graph.graph.nodes]
    return {each.split(".")[1] for each in targets if each.startswith("normwise.")}


def test_compiles_the_sum_with_a_residual() -> None:
    module = layers.AddRMSNorm(16)
    x, residual = (numbers(3, 16, seed=seed, dtype=torch.float32).requires_grad_() for seed in (0, 1))
    results = []
    for function in (compiled(module, backend="aot_eager"), module):
        y, summed = function(x, residual)
        results.append(torch.autograd.grad(y.square().sum() + summed.sin().sum(), (x, residual, *module.parameters())))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_compiles_transforms() -> None:
    module = layers.RMSNorm(8)

    def per_sample(x: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda one: module(one).pow(3).sum()))(x)

    x = numbers(4, 8, dtype=torch.float32)
    torch.testing.assert_close(compiled(per_sample, backend="eager")(x), per_sample(x))


@pytest.mark.filterwarnings("error")
def test_compiling_warns_of_nothing() -> None:
    x = numbers(3, 8, dtype=torch.float32).requires_grad_()
    compiled(layers.LayerNorm(8), backend="aot_eager")(x).sum().backward()


def test_what_is_exported_has_no_operator_of_ours() -> None:
    x, module = numbers(3, 8, dtype=torch.float32), layers.LayerNorm(8)
    program = torch.export.export(module, (x,), strict=False)
    assert not any("normwise" in str(node.target) for node in program.graph.nodes)
    assert kernels.cpu.refusal(module.spec, x, module.weight, module.bias, None) is None


# -- torch.func and forward mode ----------------------------------------------------------------------


@each_spec
def test_per_sample_gradients(spec: NormSpec) -> None:
    x, own = numbers(5, 6, 16), parameters(spec, (6, 16))

    def loss(weight: torch.Tensor | None, bias: torch.Tensor | None, one: torch.Tensor) -> torch.Tensor:
        return kernels.forward(spec, one, weight, bias).pow(3).sum()

    given = {index: each for index, each in enumerate(own) if each is not None}
    if not given:
        return
    found = vmap(grad(loss, argnums=tuple(given)), in_dims=(None, None, 0))(*own, x)
    for index, one in enumerate(x):
        leaves = [None if each is None else each.clone().requires_grad_() for each in own]
        right = torch.autograd.grad(loss(*leaves, one), [leaves[argument] for argument in given])
        for ours, expected in zip(found, right, strict=True):
            torch.testing.assert_close(ours[index], expected, rtol=1e-10, atol=1e-10)


@each_spec
def test_jacobians_and_directions(spec: NormSpec) -> None:
    x, own, along = numbers(2, 3, 4), parameters(spec, (3, 4)), numbers(2, 3, 4, seed=4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return kernels.forward(spec, x, *own)

    jacobian = jacrev(function)(x)
    right = torch.autograd.functional.jacobian(function, x)
    torch.testing.assert_close(jacobian, right, rtol=1e-10, atol=1e-10)
    tangent = jvp(function, (x,), (along,))[1]
    torch.testing.assert_close(tangent, (right * along).sum((-3, -2, -1)), rtol=1e-10, atol=1e-10)


def test_functional_calls_take_the_kernel() -> None:
    module, x = layers.RMSNorm(8), numbers(3, 8, dtype=torch.float32)
    weight = numbers(8, dtype=torch.float32)
    found = functional_call(module, {"weight": weight}, (x,))
    assert torch.equal(found, kernels.cpu.forward(module.spec, x, weight))


# -- autograd -----------------------------------------------------------------------------------------


@each_spec
def test_derivatives_of_both_orders(spec: NormSpec) -> None:
    x = numbers(2, 3, 6).requires_grad_()
    own = [None if each is None else each.requires_grad_() for each in parameters(spec, (3, 6))]
    assert taken(spec, x, *own)
    assert gradcheck(of_spec(spec), (x, *own))
    assert gradgradcheck(of_spec(spec), (x, *own))


def test_derivatives_of_both_orders_of_a_sum() -> None:
    spec = SPECS["torch layer"]
    x, residual = (numbers(2, 6, seed=seed).requires_grad_() for seed in (0, 1))
    weight, bias = (numbers(6, seed=seed).requires_grad_() for seed in (2, 3))

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight, bias = tensors
        return kernels.cpu.forward_added(spec, x, residual, weight, bias)

    assert gradcheck(function, (x, residual, weight, bias))
    assert gradgradcheck(function, (x, residual, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@each_spec
def test_a_gradient_that_is_recorded_is_the_same(spec: NormSpec, dtype: torch.dtype) -> None:
    x = numbers(4, 6, 16, dtype=dtype).requires_grad_()
    own = [None if each is None else each.requires_grad_() for each in parameters(spec, (6, 16), dtype)]
    leaves = [each for each in (x, *own) if each is not None]
    if not taken(spec, x, *own):
        pytest.skip("refused")
    y = of_spec(spec)(x, *own)
    upstream = numbers(*y.shape, seed=9, dtype=dtype)
    usual = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    recorded = torch.autograd.grad(y, leaves, upstream, create_graph=True)
    again = torch.autograd.grad(y, leaves, upstream)
    assert recorded[0].requires_grad
    for first, second, third in zip(usual, recorded, again, strict=True):
        assert torch.equal(first, third)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(first, second, rtol=8 * eps, atol=8 * eps * float(first.abs().max()))


def test_upstream_gradients_are_kept_as_they_came() -> None:
    module = layers.AddRMSNorm(8)
    x, residual = (numbers(3, 8, seed=seed, dtype=torch.float32).requires_grad_() for seed in (0, 1))
    y, summed = module(x, residual)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for each in (y, summed, x, residual):
        each.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
    upstream = [numbers(3, 8, seed=seed, dtype=torch.float32) for seed in (2, 3)]
    before = [each.clone() for each in upstream]
    for _ in range(2):
        torch.autograd.backward([y, summed], upstream, retain_graph=True)
    assert len(kept) == 8
    assert all(torch.equal(gradient, then) for gradient, then in kept)
    assert all(torch.equal(now, then) for now, then in zip(upstream, before, strict=True))
    shared = [gradient for gradient, _ in kept]
    assert x.grad is not None
    assert residual.grad is not None
    x.grad.zero_()  # the two inputs do not share memory that a later step may write to
    assert residual.grad.abs().sum() > 0
    assert all(torch.equal(gradient, then) for gradient, then in kept)
    assert shared


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    block = nn.Sequential(layers.RMSNorm(8), nn.Linear(8, 8), layers.LayerNorm(8))
    x = numbers(5, 8, dtype=torch.float32).requires_grad_()
    results = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        run(x).pow(3).sum().backward()
        results.append([x.grad, *(each.grad for each in block.parameters())])
        x.grad = None
        block.zero_grad()
    assert all(torch.equal(found, right) for found, right in zip(*results, strict=True))


def test_hooks_of_parameters_see_each_gradient_once() -> None:
    module = layers.LayerNorm(8)
    seen: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda each, name=name: seen.append(f"{name} {each.grad.shape}"))
    module(numbers(3, 8, dtype=torch.float32)).sum().backward()
    assert sorted(seen) == ["bias torch.Size([8])", "weight torch.Size([8])"]


@pytest.mark.parametrize("make", [layers.RMSNorm, layers.LayerNorm, layers.AddRMSNorm])
def test_copies_compute_the_same(make: Callable[..., nn.Module]) -> None:
    module, x = make(8), numbers(3, 8, dtype=torch.float32)
    inputs = (x, x) if make is layers.AddRMSNorm else (x,)
    expected = module(*inputs)  # plans are made by now
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        torch.testing.assert_close(twin(*inputs), expected, rtol=0, atol=0)


# -- autocast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [layers.RMSNorm, layers.LayerNorm])
def test_autocast_changes_neither_values_nor_gradients(make: Callable[..., nn.Module], weights: torch.dtype) -> None:
    module = make(16, dtype=weights)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = numbers(6, 16, dtype=torch.bfloat16).requires_grad_()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = module(x)
        assert y.dtype is torch.bfloat16
        results.append([y, *torch.autograd.grad(y.float().pow(2).sum(), (x, *module.parameters()))])
    for found, right in zip(*results, strict=True):
        assert found.dtype is right.dtype
        assert torch.equal(found, right)


def test_a_layer_trains_under_autocast() -> None:
    net, x = nn.Sequential(nn.Linear(16, 16), layers.LayerNorm(16), nn.Linear(16, 4)), numbers(9, 16).float()
    with torch.autocast("cpu", torch.bfloat16):
        net(x).float().pow(2).sum().backward()
    half = [each.grad for each in net[1].parameters()]
    net.zero_grad()
    net(x).pow(2).sum().backward()
    for found, parameter in zip(half, net[1].parameters(), strict=True):
        assert found.dtype is torch.float32
        assert (found - parameter.grad).norm() < 0.05 * parameter.grad.norm()


# -- when plain torch serves --------------------------------------------------------------------------


class Foreign(torch.Tensor):
    """A subclass that the operators know nothing of."""


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.ones(2, 8).as_subclass(Foreign), "tensor class Foreign"),
        (torch.ones(2, 8).to_sparse(), "dense tensors"),
        (torch.ones(2, 8).to_mkldnn(), "dense tensors"),
    ],
    ids=["subclass", "sparse", "mkldnn"],
)
def test_foreign_tensors_are_left_to_plain_torch(x: torch.Tensor, why: str) -> None:
    assert why in str(_calls.refusal_of_call(x))


def test_plain_torch_is_taken_where_it_is_asked_for() -> None:
    x = torch.ones(2, 8)
    assert _calls.refusal_of_call(x) is None
    with plain(), plain():
        assert "asked for" in str(_calls.refusal_of_call(x))
    assert _calls.refusal_of_call(x) is None


def test_nothing_of_distributed_is_loaded() -> None:
    program = (
        "import sys, torch, normwise.layers as n; n.RMSNorm(4)(torch.ones(2, 4));"
        "sys.exit('torch.distributed.tensor' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
