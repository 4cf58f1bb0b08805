"""Memory: what is counted as kept for the backward pass, and as held at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normwise.benchmarks._saved import peak_bytes, saved_bytes


class KeepsTwice(torch.autograd.Function):
    """Keeps a tensor, a view of it, and its weight."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x[:1], weight)
        return x * weight

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def test_a_storage_counts_once_and_parameters_do_not() -> None:
    x, weight = torch.ones(4, 100, requires_grad=True), torch.ones(100, requires_grad=True)
    assert saved_bytes(lambda: KeepsTwice.apply(x, weight), [weight]) == x.nbytes
    assert saved_bytes(lambda: KeepsTwice.apply(x, weight), []) == x.nbytes + weight.nbytes


def test_what_is_kept_for_a_view_is_the_whole_storage() -> None:
    x = torch.ones(10, 100)
    leaf = torch.ones(100, requires_grad=True)
    assert saved_bytes(lambda: leaf * x[0], []) == x.nbytes


def test_layer_norm_of_torch_keeps_its_input_and_two_numbers_a_row() -> None:
    x, norm = torch.ones(8, 1024, requires_grad=True), nn.LayerNorm(1024)
    assert saved_bytes(lambda: norm(x), norm.parameters()) == x.nbytes + 2 * 8 * 4


def test_the_peak_is_the_most_that_is_held_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(1000, 1000)

    def three_in_turn() -> float:
        for _ in range(3):
            y = x + 1
            del y
        return 0.0

    def two_at_once() -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x + 2

    assert peak_bytes(three_in_turn, x.device) == pytest.approx(x.nbytes, rel=1e-4)
    assert peak_bytes(two_at_once, x.device) == pytest.approx(2 * x.nbytes, rel=1e-4)  # beside the numbers 1 and 2
    assert capfd.readouterr().err == ""
