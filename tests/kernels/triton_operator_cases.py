"""What ``test_triton`` runs in another process about operators: autograd, fake kernels, errors, and compiling ahead."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from normwise import layers
from normwise.kernels import eager
from normwise.kernels._plans import RowPlan
from normwise.spec import NormSpec, reference
from normwise.testing import conformance
from tests.kernels.triton_cases import RMS, Case, assert_near, randn, rows


def compile_ahead(architecture: int, size: int, kind: int, dtype: torch.dtype) -> list[tuple[str, int]]:
    """Compile for a GPU that is not here, and return what is launched with the bytes it spills; not after ``start``."""
    from bench.triton_registers import launches_of

    found = launches_of(architecture, size, kind, dtype)
    return [(each.kernel, each.spills) for name in found for each in found[name]]


def check_through_autograd(spec: NormSpec, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """The part ``triton`` with the operators replaced by what it registers for CUDA, against the definition."""
    x, residual, dsum = (randn(2, 7, 40, seed=seed, dtype=dtype) for seed in (0, 1, 5))
    weight, bias = randn(40, seed=2, dtype=weight_dtype), randn(40, seed=3, dtype=weight_dtype if spec.bias else None)
    dy = randn(2, 7, 40, seed=4, dtype=eager.forward(spec, x, weight, bias).dtype)
    unit = torch.finfo(dtype).eps
    for added in (None, residual):
        leaves = [None if each is None else each.clone().requires_grad_() for each in (x, added, weight, bias)]
        wide = [None if each is None else each.detach().double().requires_grad_() for each in leaves]
        got, summed = apply(spec, *leaves)
        expected = reference(spec, wide[0] if added is None else wide[0] + wide[1], *wide[2:])  # type: ignore[operator]
        assert got.dtype == (dy.dtype if added is None else dtype)
        torch.testing.assert_close(got.double(), expected, rtol=4 * unit, atol=4 * unit)
        given, wanted = [leaf for leaf in leaves if leaf is not None], [leaf for leaf in wide if leaf is not None]
        loss, wide_loss = (got * dy).float().sum(), (expected * dy.double()).sum()
        if summed is not None:
            assert_near(summed, x.double() + residual.double())
            loss = loss + (summed * dsum).float().sum()
            wide_loss = wide_loss + ((wide[0] + wide[1]) * dsum.double()).sum()  # type: ignore[operator]
        for leaf, grad, other in zip(
            given, torch.autograd.grad(loss, given), torch.autograd.grad(wide_loss, wanted), strict=True
        ):
            assert grad.dtype == leaf.dtype
            torch.testing.assert_close(grad.double(), other, rtol=8 * unit, atol=32 * unit)


def apply(spec: NormSpec, x: Any, residual: Any, weight: Any, bias: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    from normwise.kernels import _autograd, triton

    operators = {name: SimpleNamespace(default=getattr(rows(), name)) for name in rows().__all__}
    called = {"_SAVING": "norm_rows_saving", "_ADDING": "add_norm_rows", "_BACKWARD": "norm_rows_backward"}
    patch = mock.patch.multiple(
        _autograd, ops=SimpleNamespace(**operators), **{name: getattr(rows(), op) for name, op in called.items()}
    )
    patch.start()  # never stopped: the backward pass calls them too, and this process has no other use for them
    if residual is None:
        return triton.forward(spec, x, weight, bias), None
    return triton.forward_added(spec, x, residual, weight, bias)


def check_fakes(case: Case) -> None:
    """Outputs have the shapes, strides and dtypes that the fake kernels promise ``torch.compile``."""
    x, weight = randn(2, 3, case.size, seed=0, dtype=case.dtype), randn(case.size, seed=2, dtype=case.weight)
    bias, residual = randn(case.size, seed=3, dtype=case.bias), randn(2, 3, case.size, seed=1, dtype=case.residual)
    y, stats = rows().norm_rows_saving(x, weight, bias, *case.plan)
    compare_with_fake("norm_rows", x, weight, bias, *case.plan)
    compare_with_fake("norm_rows_saving", x, weight, bias, *case.plan)
    for needs in range(8):
        compare_with_fake("norm_rows_backward", y, None, x, stats, weight, *case.plan, needs)
    if residual is not None:
        compare_with_fake("add_norm_rows", x, residual, weight, bias, *case.plan, case.wide)


def compare_with_fake(name: str, *args: Any) -> None:
    got = getattr(rows(), name)(*args)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) if isinstance(each, torch.Tensor) else each for each in args]
        promised = getattr(torch.ops.normwise, name)(*fakes)
    single = isinstance(got, torch.Tensor)
    for each, fake in zip([got] if single else got, [promised] if single else promised, strict=True):
        if each is None or fake is None:
            assert each is fake, name
        else:
            assert (each.shape, each.stride(), each.dtype) == (fake.shape, fake.stride(), fake.dtype), name


def check_errors() -> None:
    """What the programs would misread is refused, also to callers of the operators."""
    x, weight = torch.ones(2, 4), torch.ones(4)
    for message, call in (
        ("float32", lambda: rows().norm_rows(x.double(), None, None, 4, RMS, 1e-6, 0.0)),
        ("float16, bfloat16 and float32", lambda: rows().norm_rows(x, weight.double(), None, 4, RMS, 1e-6, 0.0)),
        ("sums of squares", lambda: rows().norm_rows(x, None, None, 4, 3, 1e-6, 0.0)),
        ("eps elsewhere", lambda: rows().norm_rows(x, None, None, 4, 32, 1e-6, 0.0)),
        ("divisions", lambda: rows().norm_rows(x, None, None, 4, 128, 1e-6, 0.0)),
        ("no rows of 3", lambda: rows().norm_rows(x, None, None, 3, RMS, 1e-6, 0.0)),
        ("no rows of 0", lambda: rows().norm_rows(x[:, :0], None, None, 0, RMS, 1e-6, 0.0)),
        ("(3,) does not go", lambda: rows().norm_rows(x, weight[:3], None, 4, RMS, 1e-6, 0.0)),
        ("meta", lambda: rows().norm_rows(x, weight.to("meta"), None, 4, RMS, 1e-6, 0.0)),
        ("(1, 4) does not go", lambda: rows().add_norm_rows(x, x[:1], None, None, 4, RMS, 1e-6, 0.0, False)),
        (
            "(1, 4) does not go",
            lambda: rows().norm_rows_backward(x[:1], None, x, torch.ones(1, 2), weight, 4, RMS, 1e-6, 0.0, 7),
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def check_guard() -> None:
    """A program is launched on the GPU that holds its tensors, current or not."""
    current: list[object] = []

    class Program:
        arg_names = ("x_ptr", "BLOCK")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: current.append(inside[-1])

    inside: list[object] = ["another GPU"]

    class Device:
        def __init__(self, device: object) -> None:
            self.device = device

        def __enter__(self) -> None:
            inside.append(self.device)

        def __exit__(self, *_: object) -> None:
            inside.pop()

    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    with mock.patch("torch.cuda.device", Device):
        rows()._launch(Program(), (1,), rows().MERGE, tensor)
    assert current == [torch.device("cuda", 1)]


class Interpreted(torch.nn.Module):
    """A layer whose calls go to the interpreted programs as on a GPU, and to ``eager`` where they are refused."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.spec, self.weight, self.bias = layer.spec, layer.weight, layer.bias

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Normalize ``x``, or add ``residual`` and return the sum too."""
        from normwise.kernels import triton

        plan = triton.cpu.plan_of(self.spec)
        assert isinstance(plan, RowPlan)
        why = triton.refusal_of_code(plan.code, x.dtype) or plan.refusal(x, self.weight, self.bias, None)
        if why is None:
            y, summed = apply(self.spec, x, residual, self.weight, self.bias)
        else:
            summed = None if residual is None else x + residual
            y = eager.forward(self.spec, x if summed is None else summed, self.weight, self.bias)
        return y if residual is None else (y, summed)


LAYERS: dict[str, tuple[Any, bool]] = {  # and whether they add a residual
    "RMSNorm": (layers.RMSNorm, False),
    "LayerNorm": (layers.LayerNorm, False),
    "gemma": (lambda size: layers.RMSNorm.like("gemma", size), False),
    "llama": (lambda size: layers.RMSNorm.like("llama", size), False),
    "AddRMSNorm": (layers.AddRMSNorm, True),
    "AddLayerNorm": (layers.AddLayerNorm, True),
}


def failed_checks(name: str) -> list[str]:
    """Return what fails of the conformance suite for the programs of a layer."""
    make, residual = LAYERS[name]
    try:
        conformance(lambda size: Interpreted(make(size)), make(1).spec, residual=residual)
    except AssertionError as error:
        return str(error).splitlines()[1:]
    return []
