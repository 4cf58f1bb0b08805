"""The compiled kernels of rows under everything that PyTorch does to operators."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jacrev, jvp, vmap

from normwise import functional as nf
from normwise import kernels, layers
from normwise.kernels import _calls
from normwise.kernels._ops import ops
from normwise.spec import NormSpec
from normwise.spec.definition import plain
from tests.kernels.cpu_cases import HALF, each_spec, needs_library, numbers, of_spec, parameters, taken

pytestmark = [
    needs_library,
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

DTYPES = (torch.float32, torch.float64, *HALF)
CODES = {"rms": 0, "layer": 1, "torch layer": 2, "l2, eps outside": 3 + 32 + 128, "clamp": 64 + 128, "promoted": 12}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


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
        x, weight = numbers(*shape, dtype=dtype), None if held is None else numbers(size, dtype=held)
        if len(shape) > 1:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        mode = FakeTensorMode()
        fake_weight = None if weight is None else mode.from_tensor(weight)
        with mode:
            found = run_all(mode.from_tensor(x), fake_weight, size, code)
        for fake, real in zip(found, run_all(x, weight, size, code), strict=True):
            assert as_seen(fake) == as_seen(real)


def as_seen(output: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if output is None else (output.shape, output.dtype, output.stride())


def run_all(x: torch.Tensor, weight: torch.Tensor | None, size: int, code: int) -> list[torch.Tensor | None]:
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
        weight, bias = (None if each is None else each.clone().requires_grad_() for each in own)
        leaves = [each for each in (weight, bias) if each is not None]
        right = torch.autograd.grad(loss(weight, bias, one), leaves)
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
