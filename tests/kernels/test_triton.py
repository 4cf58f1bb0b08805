"""The Triton kernels, interpreted on a CPU, agree with the definition; compiled ahead for GPUs, nothing spills."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from normwise.kernels import triton
from normwise.spec import Cast, Form, NormSpec, Statistic, Weight
from tests.kernels import triton_cases as cases
from tests.kernels import triton_operator_cases as operator_cases
from tests.kernels.triton_cases import LAYER, PROMOTE, RMS, ROUND, Case

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
F, B, H = torch.float32, torch.bfloat16, torch.float16
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=cases.start) as process:
        yield lambda function, *args: process.submit(function, *args).result()


# dtype of x, weight, bias, residual; offset, code, sum in float32
VARIANTS = {
    "float32": (F, F, F, None, 0.0, 0, False),
    "llama": (B, B, None, None, 0.0, ROUND, False),
    "gemma": (B, B, None, None, 1.0, 0, False),
    "mixed": (B, F, F, None, 0.0, 0, False),
    "promoted": (H, F, None, None, 1.0, ROUND | PROMOTE, False),
    "plain": (F, None, None, None, 0.0, 0, False),
    "bias alone": (B, None, F, None, 0.0, 0, False),
    "add": (F, F, F, F, 0.0, 0, False),
    "add halves": (H, H, H, H, 0.0, ROUND, False),
    "add to a wide stream": (B, B, None, F, 0.0, ROUND, False),
    "add to a wide sum": (B, F, None, B, 1.0, 0, True),
    "add, and promote nothing": (H, F, None, H, 0.0, PROMOTE, False),
    "add without gain": (B, None, None, B, 0.0, 0, False),
}


def variant(name: str, size: int, kind: int, n: int) -> Case:
    x, weight, bias, residual, offset, code, wide = VARIANTS[name]
    return Case(size, kind, n, x, weight, bias, residual, offset, code, wide)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(  # rows for several programs
    ("kind", "size", "n"),
    [
        (RMS, 3, 1100),
        (LAYER, 200, 40),
        pytest.param(RMS, 200, 40, marks=pytest.mark.slow),
        pytest.param(LAYER, 3, 1100, marks=pytest.mark.slow),
    ],
    ids=["rms-3", "layer-200", "rms-200", "layer-3"],
)
def test_agrees_with_the_definition_and_its_gradients(
    interpreted: Run, size: int, n: int, name: str, kind: int
) -> None:
    interpreted(cases.check, variant(name, size, kind, n))


@pytest.mark.parametrize("kind", [RMS, LAYER], ids=["rms", "layer"])
@pytest.mark.parametrize(
    ("size", "name"),
    [
        *((size, "float32") for size in (1, 2, 31, 33, 64, 127, 128, 513, 1024, 1025, 8193)),
        (8192, "add"),
        (16384, "mixed"),
        (16385, "add halves"),
    ],
)
def test_agrees_at_any_width(interpreted: Run, size: int, name: str, kind: int) -> None:
    interpreted(cases.check, variant(name, size, kind, 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RMS, LAYER], ids=["rms", "layer"])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("size", [1, 2, 63, 65, 768, 4097, 8192, 8193, 16384, 16385, 24577, 65535, 65536, 70000])
def test_agrees_at_any_width_in_every_variant(interpreted: Run, size: int, name: str, kind: int) -> None:
    interpreted(cases.check, variant(name, size, kind, 5))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_agrees_at_widths_nobody_chose(interpreted: Run, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = int(70000 ** torch.rand(1, generator=generator).item())
    name = list(VARIANTS)[int(torch.randint(len(VARIANTS), (1,), generator=generator))]
    interpreted(cases.check, variant(name, size, seed % 2, max(2, 4000 // size)))


WIDTHS = {"narrow": (24, 50), "held": (1500, 5), "swept": (16400, 2)}
of_each_width = pytest.mark.parametrize(("size", "n"), WIDTHS.values(), ids=WIDTHS)
# where the widest rows take the interpreter seconds, and other tests read them by default
of_each_width_in_time = pytest.mark.parametrize(
    ("size", "n"), [*list(WIDTHS.values())[:2], pytest.param(*WIDTHS["swept"], marks=pytest.mark.slow)], ids=WIDTHS
)
of_each_kind = pytest.mark.parametrize("kind", [RMS, LAYER], ids=["rms", "layer"])


@of_each_kind
@of_each_width
@pytest.mark.parametrize("dtype", [F, B])
@pytest.mark.parametrize("peak", [2.0**41, 3e38])
def test_large_finite_rows_come_out_normalized(
    interpreted: Run, size: int, n: int, kind: int, dtype: torch.dtype, peak: float
) -> None:
    interpreted(cases.check_large, Case(size, kind, min(n, 3), dtype, weight=None), peak)


@of_each_width_in_time
def test_every_layout_is_read_as_it_lies(interpreted: Run, size: int, n: int) -> None:
    interpreted(cases.check_layouts, Case(size, LAYER, n, bias=F))


@of_each_kind
@of_each_width
def test_offsets_beyond_two_to_the_31(interpreted: Run, size: int, n: int, kind: int) -> None:
    interpreted(cases.check_far, Case(size, kind, 3, B))


@of_each_kind
@pytest.mark.parametrize("dtype", [F, B, H])
def test_empty_batches(interpreted: Run, dtype: torch.dtype, kind: int) -> None:
    interpreted(cases.check_empty, Case(16, kind, 0, dtype, weight=dtype))


def test_leading_axes_are_rows_and_trailing_ones_may_be_one(interpreted: Run) -> None:
    interpreted(cases.check_shapes, Case(24, LAYER, 5, F, F, F))


@of_each_kind
@of_each_width_in_time
def test_bits_repeat_and_rows_do_not_depend_on_each_other(interpreted: Run, size: int, n: int, kind: int) -> None:
    interpreted(cases.check_independence, Case(size, kind, n, bias=F))


@of_each_width_in_time
def test_only_what_is_needed_is_returned(interpreted: Run, size: int, n: int) -> None:
    interpreted(cases.check_needs, Case(size, LAYER, n, bias=F))


@pytest.mark.parametrize("weight", [F, H])
@pytest.mark.parametrize(
    ("cast", "offset", "promote"),
    [
        ("before_weight", 0.0, False),
        ("before_weight", 1.0, False),
        ("before_weight", 0.0, True),
        ("after_weight", 0.0, False),
        ("after_weight", 1.0, False),
    ],
)
def test_rounds_where_eager_rounds(
    interpreted: Run, weight: torch.dtype, cast: str, offset: float, promote: bool
) -> None:
    interpreted(cases.check_rounding, 300, weight, cast, offset, promote)


def test_the_offset_is_added_in_the_dtype_that_the_norm_says(interpreted: Run) -> None:
    interpreted(cases.check_offset_in_weight_dtype)


@of_each_kind
@of_each_width
def test_a_row_that_is_not_finite_spoils_no_other(interpreted: Run, size: int, n: int, kind: int) -> None:
    interpreted(cases.check_not_finite, Case(size, kind))


@of_each_kind
@of_each_width
def test_constant_rows(interpreted: Run, size: int, n: int, kind: int) -> None:
    interpreted(cases.check_constant_rows, Case(size, kind))


PLAIN = NormSpec(eps=1e-5)
LAYER_SPEC = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True)


@pytest.mark.parametrize(
    ("spec", "dtype", "weight"),
    [
        (PLAIN, F, F),
        (replace(PLAIN, cast=Cast.BEFORE_WEIGHT, out_dtype="promoted"), B, F),
        (replace(PLAIN, cast=Cast.AFTER_WEIGHT, weight_offset=1.0), H, H),
        (replace(PLAIN, eps=None), F, F),
        (LAYER_SPEC, B, F),
        (replace(LAYER_SPEC, form=Form.TORCH), F, F),
    ],
)
def test_the_part_serves_specs_with_gradients(
    interpreted: Run, spec: NormSpec, dtype: torch.dtype, weight: torch.dtype
) -> None:
    interpreted(operator_cases.check_through_autograd, spec, dtype, weight)


@pytest.mark.slow  # the interpreter takes half a minute a layer
@pytest.mark.parametrize("name", operator_cases.LAYERS)
def test_passes_the_conformance_suite(interpreted: Run, name: str) -> None:
    assert interpreted(operator_cases.failed_checks, name) == []


@of_each_kind
@pytest.mark.parametrize("name", ["float32", "promoted", "plain", "add to a wide sum", "add halves"])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 24])
def test_outputs_are_what_the_fake_kernels_promise(interpreted: Run, size: int, name: str, kind: int) -> None:
    interpreted(operator_cases.check_fakes, variant(name, size, kind, 6))


def test_operators_refuse_what_programs_would_misread(interpreted: Run) -> None:
    interpreted(operator_cases.check_errors)


def test_programs_run_on_the_gpu_that_holds_the_tensors(interpreted: Run) -> None:
    interpreted(operator_cases.check_guard)


# -- the part, on a machine without a GPU --------------------------------------------------------


def test_without_triton_the_part_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    why = triton.unavailable.__wrapped__()
    assert why is not None
    assert "not installed" in why


def test_without_a_gpu_the_part_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert triton.unavailable.__wrapped__() == "torch sees no GPU"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert triton.unavailable.__wrapped__() is None


def test_importing_the_part_does_not_import_triton() -> None:
    code = "import sys; import normwise.kernels.triton; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def on_gpu(*shape: int, dtype: torch.dtype = F) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(*shape, dtype=dtype, device="cuda")


def test_takes_the_norms_of_models() -> None:
    x, weight = on_gpu(2, 8, dtype=B), on_gpu(8)
    assert triton.refusal(PLAIN, x, weight, None, None) is None
    assert triton.refusal(LAYER_SPEC, x, weight, weight, None) is None
    assert triton.refusal(replace(LAYER_SPEC, form=Form.TORCH), on_gpu(2, 8), None, None, None) is None


@pytest.mark.parametrize(
    ("spec", "x", "weight", "reason"),
    [
        (PLAIN, torch.ones(2, 8), None, "on a GPU"),
        (PLAIN, on_gpu(2, 8, dtype=torch.float64), None, "float32"),
        (replace(PLAIN, statistic=Statistic.L2), on_gpu(2, 8), None, "sums of squares"),
        (replace(PLAIN, eps_inside=False), on_gpu(2, 8), None, "eps elsewhere"),
        (replace(PLAIN, eps_clamp=True), on_gpu(2, 8), None, "eps elsewhere"),
        (replace(PLAIN, form=Form.DIVISION), on_gpu(2, 8), None, "quotient"),
        (replace(PLAIN, weight=Weight.SCALAR), on_gpu(2, 8), on_gpu(1), "single number"),
        (replace(PLAIN, eps=0.0), on_gpu(2, 8), None, "eps = 0"),
        (PLAIN, on_gpu(2, 8), torch.ones(8), "another device"),
    ],
)
def test_refuses_with_a_reason(spec: NormSpec, x: torch.Tensor, weight: torch.Tensor | None, reason: str) -> None:
    why = triton.refusal(spec, x, weight, None, None)
    assert why is not None
    assert reason in why


def test_refuses_operands_of_other_norms() -> None:
    x = on_gpu(2, 8)
    assert triton.refusal(PLAIN, x, None, None, x > 0) == "it takes no mask for a norm of rows"
    assert triton.refusal(PLAIN, x, None, None, None, gate=x) == "it takes no gate for a norm of rows"


def test_is_registered_for_cuda() -> None:
    for name in ("norm_rows", "norm_rows_saving", "norm_rows_backward", "add_norm_rows"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"normwise::{name}", "CUDA")


# -- compiled ahead, without a GPU ---------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> Iterator[Run]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield lambda function, *args: process.submit(function, *args).result()


PAGE = Path(__file__).parents[2] / "bench" / "triton_registers.md"


@pytest.mark.parametrize("architecture", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize(
    ("size", "kind", "dtype"), [(64, LAYER, F), (512, RMS, F), (8192, LAYER, B), (16384, RMS, B), (65536, LAYER, F)]
)
def test_compiles_ahead_and_spills_nothing(
    compiled: Run, architecture: int, size: int, kind: int, dtype: torch.dtype
) -> None:
    launches = compiled(operator_cases.compile_ahead, architecture, size, kind, dtype)
    assert {kernel for kernel, _ in launches} >= {"merge", "backward_tile"}
    assert all(spills == 0 for _, spills in launches), launches


def test_the_page_lists_kernels_that_spill_nothing() -> None:
    spills = re.findall(r"^\| \d+ \| .* \| (\d+) \| \d+ \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(spills) > 200
    assert set(spills) == {"0"}
