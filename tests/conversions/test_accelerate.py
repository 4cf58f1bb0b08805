"""accelerate: what it leaves and why, what it prints, and where the model still works."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations

import normwise as nw
from normwise import layers
from normwise.conversions import swap_layers
from tests.conversions import hand_written as hand
from tests.conversions.hand_written import redrawn, relative
from tests.conversions.test_swap_layers import swapped


def overwritten() -> nn.Module:
    norm: Any = nn.LayerNorm(6)
    norm.forward = lambda input: input + nn.functional.layer_norm(input, (6,))
    return nn.Sequential(norm)


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def hooked() -> nn.Module:
    norm = nn.LayerNorm(6)
    norm.register_forward_hook(_doubled)
    return nn.Sequential(norm)


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Sequential(nn.LayerNorm(6)))


def quantized() -> nn.Module:
    norm = nn.LayerNorm(6)
    norm.weight = nn.Parameter(torch.ones(6, dtype=torch.int8), requires_grad=False)
    return nn.Sequential(norm)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (hooked(), "hooks are registered on it"),
        (overwritten(), "its forward was replaced on the instance"),
        (quantized(), "its weight holds int8 numbers; convert the model before it is quantized"),
        (nn.Sequential(parametrizations.weight_norm(nn.LayerNorm(6))), "a tensor of it is parametrized"),
        (nn.Sequential(hand.Conditional(6)), "its forward takes 'skip' as well"),
        (nn.Sequential(hand.Twice(6)), "the parameter 'weight' is no gain"),
        (nn.Sequential(nn.SyncBatchNorm(6)), "shares statistics between processes"),
        (nn.LayerNorm(6), "the model itself is the norm"),
        (scripted(), "compiled by TorchScript"),
    ],
    ids=lambda each: each[:30] if isinstance(each, str) else "",
)
def test_what_must_not_be_replaced_is_left_with_the_reason(model: nn.Module, why: str) -> None:
    before = repr(model)
    done = nw.accelerate(model)
    assert done.replaced == ()
    assert why in done.left[0].why
    assert repr(model) == before


def test_what_is_no_norm_is_neither_replaced_nor_listed() -> None:
    others = [
        *(nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Conv1d(6, 6, 3, bias=False), nn.Embedding(9, 6)),
        *(
            nn.GELU(),
            nn.Softmax(-1),
            nn.Dropout(),
            nn.Identity(),
            nn.PReLU(),
            nn.MultiheadAttention(6, 2),
            nn.GRU(6, 6),
        ),
    ]
    done = nw.accelerate(nn.ModuleList(others))
    assert (done.replaced, done.left) == ((), ())


def test_with_inputs_a_norm_inside_a_forward_is_named_with_its_line() -> None:
    model = nn.Sequential(hand.Inside(6), nn.LayerNorm(6))
    done = nw.accelerate(model, torch.randn(2, 6))
    assert [change.path for change in done.replaced] == ["1"]
    assert done.left[0].path == "0"
    assert "inside the forward" in done.left[0].why
    assert "hand_written.py:" in str(done.left[0].source)


@pytest.mark.parametrize("given", ["hf:llama", None, torch.zeros(3)])
def test_accelerate_takes_modules_only(given: Any) -> None:
    with pytest.raises(TypeError, match=r"changes a torch.nn.Module in place, given a (str|NoneType|Tensor)"):
        nw.accelerate(given)


def test_a_lazy_norm_is_left_until_it_has_channels() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    assert nw.accelerate(model).replaced == ()
    model(torch.randn(4, 6))
    assert len(nw.accelerate(model).replaced) == 1


# -- accelerate ----------------------------------------------------------------------------------


def test_the_result_prints_as_a_table_of_what_was_done_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(3)), hooked())
    page = str(nw.accelerate(model))
    assert "3 norms replaced, 1 left" in page
    assert "{0-2}.1" in page
    assert "LayerNorm -> normwise LayerNorm" in page
    assert "equal to the bit in float32" in page
    assert "left: hooks are registered on it" in page


def test_the_structure_is_swapped_on_meta_for_weights_that_are_loaded_later() -> None:
    with torch.device("meta"):
        model = nn.Sequential(hand.GammaBeta(6), nn.BatchNorm1d(6), nn.LayerNorm(6))
    assert len(nw.accelerate(model).replaced) == 3
    weights = redrawn(nn.Sequential(hand.GammaBeta(6), nn.BatchNorm1d(6), nn.LayerNorm(6)))
    model.load_state_dict(weights.state_dict(), strict=True, assign=True)
    x = torch.randn(4, 6)
    assert relative(model.eval()(x), weights.eval()(x)) < 1e-6


def test_a_large_model_without_its_weights_is_planned_as_with_them() -> None:
    with FakeTensorMode():
        model = nn.Sequential(hand.GammaBeta(6), nn.BatchNorm1d(6), nn.LayerNorm(6))
    assert len(swap_layers.plan_of_model(model).changes) == 3


def test_a_model_inside_a_wrapper_is_changed_inside() -> None:
    model = nn.DataParallel(nn.Sequential(nn.LayerNorm(6)))
    done = nw.accelerate(model)
    assert done.replaced[0].path == "module.0"
    assert isinstance(model.module[0], layers.LayerNorm)


def test_autocast_gives_what_it_gave() -> None:
    model = redrawn(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), hand.GammaBeta(6), nn.RMSNorm(6)))
    twin, _ = swapped(model)
    x = torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, ours = model(x), twin(x)
    assert ours.dtype is y.dtype
    assert relative(ours, y) < 2e-2


@pytest.mark.slow
def test_torch_compile_takes_the_swapped_model_and_one_compiled_before() -> None:
    model = redrawn(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), hand.GammaBeta(6), nn.RMSNorm(6)))
    twin, _ = swapped(model)
    x = torch.randn(4, 6)
    assert relative(torch.compile(twin, backend="aot_eager", fullgraph=True)(x), model(x)) < 1e-5
    compiled: Any = torch.compile(model, backend="aot_eager")
    y = compiled(x)
    done = nw.accelerate(compiled)
    assert done.replaced[0].path == "_orig_mod.1"
    assert relative(compiled(x), y) < 1e-5
