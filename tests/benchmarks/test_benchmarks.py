"""Each benchmark runs to its end on small shapes, and its rows say what they should."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from normwise import benchmarks
from normwise._parts import page, page_title
from normwise.benchmarks import BACKWARD, BENCHMARKS, BOTH, CLONE, FORWARD, OURS, Method, Result, Row, _rivals
from normwise.benchmarks._contest import Built, Contest, Rival, Setting
from normwise.benchmarks._onnx import session
from normwise.benchmarks._options import Options

ONCE = Method(rounds=1, fill=0.0, least=1)
TINY = {"norms": "8x16", "small": "4x8", "batch-norm": "2x4x6x6", "llama": "1x8", "conversions": "1x4"}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: nn.Module) -> Built:
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(_rivals, "_compiled", fails)


def tiny(name: str, **options: Any) -> Result:
    return benchmarks.run(name, method=ONCE, shapes=(TINY[name],), **options)


def rivals(rows: list[Row], what: str) -> list[str]:
    return [row.rival for row in rows if row.what == what]


# -- the family ------------------------------------------------------------------------------


@pytest.mark.parametrize("part", BENCHMARKS.values(), ids=BENCHMARKS)
def test_every_benchmark_has_a_page_in_two_languages_and_shapes_of_its_kind(part: ModuleType) -> None:
    assert page_title(part).endswith((".", "costs beside its arithmetic."))
    assert page_title(part, "zh") != page_title(part)
    assert len(page(part)) < 600
    axes = len(part.SHAPE.split("x"))
    assert {len(shape) for shape in (*part.SHAPES, *part.QUICK_SHAPES)} == {axes}
    assert part.QUICK.rounds < part.METHOD.rounds
    assert set(part.QUICK_DTYPES) <= set(part.DTYPES)


def test_the_default_comes_first_and_every_name_is_known() -> None:
    assert benchmarks.names()[0] == benchmarks.DEFAULT
    assert set(benchmarks.names()) == set(TINY)
    assert benchmarks.find("Batch_Norm") is BENCHMARKS["batch-norm"]


# -- to the end ------------------------------------------------------------------------------


def test_norms_has_every_layer_beside_its_rivals(no_compiler: None) -> None:
    result = tiny("norms", eager=True)
    contests = {(rows[0].layer, rows[0].dtype): rows for rows in result.contests()}
    layers = ("RMSNorm", "LayerNorm", "AddRMSNorm", "AddLayerNorm")
    assert set(contests) == {(layer, dtype) for layer in layers for dtype in ("float32", "bfloat16")}
    usual = [OURS, "normwise eager", "torch.nn", "torch.compile"]
    for (layer, _), rows in contests.items():
        own = [*usual, "transformers"] if "RMS" in layer else usual
        limits = [CLONE, "torch.add, clone"] if layer.startswith("Add") else [CLONE]
        assert rivals(rows, FORWARD) == [*limits, *own, "ONNX Runtime"]
        assert rivals(rows, BACKWARD) == rivals(rows, BOTH) == own
    assert result.find(layer="RMSNorm", dtype="float32", rival="ONNX Runtime", what=FORWARD).ms
    why = result.find(layer="RMSNorm", dtype="bfloat16", rival="ONNX Runtime", what=FORWARD).why
    assert why == "ValueError: its CPU operators do not take bfloat16"
    failed = [row for row in result.rows if row.rival == "torch.compile"]
    assert {row.why for row in failed} == {"RuntimeError: no C++ compiler here"}
    assert {row.ms for row in failed} == {None}
    assert result.finished


def test_small_has_the_functions_beside_the_layers(no_compiler: None) -> None:
    result = tiny("small", dtypes=("float32",))
    rms, layer = result.contests()
    functions = ["normwise.functional", "torch.nn", "torch.compile"]
    assert rivals(rms, BOTH) == [OURS, *functions, "transformers", "F.rms_norm", "F.layer_norm"]
    assert rivals(layer, BOTH) == [OURS, *functions, "F.layer_norm"]
    assert rivals(layer, BACKWARD) == []


def test_batch_norm_has_both_layouts(no_compiler: None) -> None:
    result = tiny("batch-norm", dtypes=(torch.float32,), eager=True)
    told = [(rows[0].layer, rows[0].layout) for rows in result.contests()]
    assert told == [(layer, layout) for layer in ("BatchNorm2d", "GroupNorm") for layout in (None, "channels_last")]
    by_onnx = [row for row in result.rows if row.rival == "ONNX Runtime"]
    assert [bool(row.ms) for row in by_onnx] == [True, False, True, False]
    assert {row.why for row in result.rows if row.rival != "ONNX Runtime"} == {
        None,
        "RuntimeError: no C++ compiler here",
    }


def test_converted_models_are_proved_and_raced_beside_the_original() -> None:
    result = tiny("conversions", quick=True)
    told = {(row.layer, row.rival) for row in result.rows if row.ms}
    assert {rival for layer, rival in told if layer == "GPT-2"} == {
        OURS, f"{OURS}, weightless", f"{OURS}, swap-layers", "transformers",
    }  # fmt: skip
    assert {rival for layer, rival in told if layer == "BERT"} == {OURS, "transformers"}


def test_llama_swaps_every_norm_and_tells_the_peak() -> None:
    result = tiny("llama", eager=True)
    assert [row.rival for row in result.rows] == [OURS, "normwise eager", "transformers"]
    weights = 25_000_000 * 4  # the gradients alone
    assert all(row.peak_bytes and row.peak_bytes > weights and row.ms for row in result.rows)
    assert result.rows[0].relative == 1.0


def test_swapping_leaves_no_norm_of_transformers_and_shares_the_weights() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from normwise.benchmarks import llama

    (contest,) = llama.contests(Options.of(llama, shapes=("1x2",)), 1)
    model = contest._model()
    before = {id(parameter) for parameter in model.parameters()}
    assert llama.swap(model, llama._ours) == 17
    assert not any(isinstance(each, LlamaRMSNorm) for each in model.modules())
    assert {id(parameter) for parameter in model.parameters()} == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the command line shows none either
def test_torch_compile_is_a_rival_that_runs() -> None:
    result = tiny("norms", dtypes=("float32",))
    compiled = [row for row in result.rows if row.rival == "torch.compile"]
    assert len(compiled) == 12
    assert {row.why for row in compiled} == {None}
    saved = [row.saved for row in compiled if row.saved is not None]
    assert len(saved) == 4


# -- what rows say ------------------------------------------------------------------------------


class Spends(nn.Module):
    """Doubles its input in two steps, of which the first keeps a copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2


def contest(*others: Callable[[], Built], residual: bool = False) -> Contest:
    setting = Setting(layer="L", shape=(4, 1000), dtype=torch.bfloat16, threads=1, residual=residual)
    given = [Rival(name=OURS, build=lambda: _rivals.built(Spends()))]
    given += [Rival(name=f"other {index}", build=each) for index, each in enumerate(others)]
    return Contest(setting=setting, rivals=given, check=lambda: None)


def test_multiples_and_bandwidth_follow_from_the_medians() -> None:
    rows, finished = contest(lambda: _rivals.built(Spends())).run(Method(rounds=3, fill=0.0))
    assert finished
    figures: list[Any] = rows
    copy, ours, theirs = (row for row in figures if row.what == FORWARD)
    size = 4 * 1000 * 2
    assert None not in (copy.ms, ours.ms, theirs.ms)
    assert copy.copies == 1.0
    assert ours.copies == pytest.approx(ours.ms / copy.ms)
    assert theirs.relative == pytest.approx(theirs.ms / ours.ms)
    assert copy.gb_per_s == pytest.approx(2 * size / copy.ms / 1e6)
    moved = {FORWARD: 2, BACKWARD: 3, BOTH: 5}
    for row in figures[1:]:
        assert row.gb_per_s == pytest.approx(moved[row.what] * size / row.ms / 1e6)
        assert row.low <= row.ms <= row.high
        assert (row.rounds, row.calls) == (3, 3)
        assert row.saved == (1.0 if row.what == BOTH else None)


def test_a_rival_that_cannot_be_built_has_a_row_that_says_why() -> None:
    def missing() -> Built:
        raise ImportError("No module named 'quack'")

    rows, finished = contest(missing).run(ONCE)
    assert finished
    assert {(row.ms, row.why) for row in rows if row.rival == "other 0"} == {
        (None, "ImportError: No module named 'quack'")
    }


def test_forward_is_timed_without_gradients_and_backward_with() -> None:
    seen: list[tuple[bool, bool]] = []

    def notes(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), x.requires_grad))
        return x * 1

    rows, _ = contest(lambda: Built(notes)).run(ONCE)
    assert rows
    assert set(seen) == {(False, False), (True, True)}


@pytest.mark.parametrize(
    ("name", "residual"),
    [
        ("RMSNorm", False),
        ("LayerNorm", False),
        ("GroupNorm", False),
        ("BatchNorm2d", False),
        ("RMSNorm", True),
        ("LayerNorm", True),
    ],
)
def test_onnx_runtime_computes_what_torch_does(name: str, residual: bool) -> None:
    images = name in ("GroupNorm", "BatchNorm2d")
    shape = (3, 8, 5, 4) if images else (5, 8)
    module = getattr(nn, name)(*((4, 8) if name == "GroupNorm" else (8,)), eps=1e-3)
    setting = Setting(layer=name, shape=shape, dtype=torch.float32, threads=1, residual=residual)
    x, *rest = setting.inputs()
    total = x + rest[0] if rest else x
    found = session(module, setting)(x, *rest)
    torch.testing.assert_close(torch.from_numpy(found[0]), module(total).detach(), rtol=1e-5, atol=1e-5)
    if residual:
        torch.testing.assert_close(torch.from_numpy(found[-1]), total)


# -- threads, interrupts, bad input ------------------------------------------------------------------


def test_threads_are_set_for_the_run_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from normwise.benchmarks import _options, small

    seen: list[int] = []
    before = torch.get_num_threads()

    def notes(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x * 1

    only = contest(lambda: Built(notes))
    monkeypatch.setattr(small, "contests", lambda options, threads: [only])
    monkeypatch.setattr(_options, "cpus", lambda: 3)
    result = benchmarks.run("small", method=ONCE, threads=(1, 3))
    assert set(seen) == {1, 3}
    assert torch.get_num_threads() == before
    assert result.finished


def test_an_interrupt_keeps_the_contests_that_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from normwise.benchmarks import small

    def stops(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(small, "contests", lambda *_: [contest(), contest(lambda: Built(stops)), contest()])
    result = benchmarks.run("small", method=ONCE)
    assert not result.finished
    assert {row.rival for row in result.rows} == {CLONE, OURS}


BAD = [
    ({"threads": (0,)}, r"--threads takes 1 to \d+ on this machine, given 0"),
    ({"threads": (100_000,)}, r"--threads takes 1 to \d+ on this machine, given 100000"),
    ({"shapes": ("4",)}, "--shape takes ROWSxWIDTH such as 8x1024 here, given '4'"),
    ({"shapes": ("4x-1",)}, "given '4x-1'"),
    ({"shapes": ("4x0",)}, "given '4x0'"),
    ({"shapes": ("fourxfive",)}, "given 'fourxfive'"),
    ({"device": "no-such"}, "no device 'no-such' here"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        benchmarks.run("small", **options)


def test_a_row_that_is_not_there_is_a_lookup_error(no_compiler: None) -> None:
    result = tiny("small", dtypes=("float32",))
    with pytest.raises(LookupError, match="0 rows of small"):
        result.find(layer="Nothing")
    with pytest.raises(LookupError, match=r"\d+ rows of small"):
        result.find(layer="RMSNorm")
