"""Nothing is timed if the results are wrong: kernels with planted faults are refused, by name, with evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from normwise import benchmarks, kernels, layers
from normwise.benchmarks import Method, Wrong
from normwise.benchmarks._check import check_layer
from normwise.cli import main

ONCE = Method(rounds=1, fill=0.0, least=1)
right = kernels.forward


def slightly_off(*arguments: Any, **operands: Any) -> torch.Tensor:
    return right(*arguments, **operands) * 1.001


class WrongGradient(torch.autograd.Function):
    """The right value, and a gradient that is off by a hundredth."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 1.01


def gradient_off(*arguments: Any, **operands: Any) -> torch.Tensor:
    return WrongGradient.apply(right(*arguments, **operands))


def writes_into_the_gradient(*arguments: Any, **operands: Any) -> torch.Tensor:
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            kept = grads[0].clone()
            grads[0].zero_()
            return kept

    return InPlace.apply(right(*arguments, **operands))


FAULTS = [
    (slightly_off, "the definition in float32"),
    (gradient_off, "gradient of the input in float32"),
    (writes_into_the_gradient, "the upstream gradient is left alone"),
]


def plant(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every call computed by ``fault``, those too that would take the short way to the operators."""
    monkeypatch.setattr(kernels, "forward", fault)
    monkeypatch.setattr(kernels, "attempt", lambda *_: None)


@pytest.mark.parametrize(("fault", "what"), FAULTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_wrong_kernel_is_refused_and_nothing_is_printed(
    fault: Any, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plant(fault, monkeypatch)
    written = tmp_path / "bench.json"
    assert main(["bench", "norms", "--shape", "64x32", "--dtype", "float32", "-o", str(written)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("normwise: nothing was timed, RMSNorm is wrong on 64x32 float32: it failed")
    assert f"{what}: measured " in err
    assert err.count("normwise: ") == 1
    assert not written.exists()


def test_everything_is_checked_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    plant(slightly_off, monkeypatch)
    with pytest.raises(Wrong):
        benchmarks.run("small", shapes=("4x8",), method=ONCE, advance=lambda text, *_: told.append(text))
    assert all(each.startswith("checking ") for each in told)


def test_a_swapped_llama_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from normwise.benchmarks import llama

    usual = llama._ours

    def other_eps(norm: Any) -> Any:
        made: Any = usual(norm)
        made.eps = 0.1
        return made

    monkeypatch.setattr(llama, "_ours", other_eps)
    with pytest.raises(Wrong, match=r"the loss with our norms is [\d.]+, with those of transformers [\d.]+; they may"):
        benchmarks.run("llama", shapes=("1x4",), method=ONCE)


@pytest.mark.parametrize("layout", [None, "channels_last"])
def test_a_fault_in_one_layout_is_seen_there(layout: str | None) -> None:
    class Faulty(layers.BatchNorm2d):
        def forward(self, input: torch.Tensor, **masks: Any) -> torch.Tensor:
            odd = input.is_contiguous(memory_format=torch.channels_last)
            return super().forward(input, **masks) * (1.1 if odd else 1.0)

    def judge() -> None:
        check_layer(lambda: Faulty(6), Faulty(6).spec, (32, 6, 4, 4), torch.float32, layout=layout)

    if layout is None:
        judge()
    else:
        with pytest.raises(Wrong, match="Faulty is wrong on 3x6x4x4 float32 channels_last: it failed"):
            judge()
