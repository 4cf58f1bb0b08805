"""Norms with running statistics under activation checkpointing: what is computed again is not counted again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from normwise import layers
from normwise.layers.sync_batch_norm import SyncBatchNorm

# Name, how to build one, and an input it takes.
NORMS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "BatchNorm": (partial(layers.BatchNorm, channel_dim=-1), (4, 5, 3)),
    "BatchNorm1d": (layers.BatchNorm1d, (4, 3)),
    "BatchNorm2d": (layers.BatchNorm2d, (4, 3, 2, 2)),
    "BatchNorm3d": (layers.BatchNorm3d, (4, 3, 2, 1, 2)),
    "SyncBatchNorm": (SyncBatchNorm, (4, 3, 2)),
    "InstanceNorm1d": (partial(layers.InstanceNorm1d, affine=True, track_running_stats=True), (4, 3, 5)),
    "InstanceNorm2d": (partial(layers.InstanceNorm2d, affine=True, track_running_stats=True), (4, 3, 2, 2)),
    "InstanceNorm3d": (partial(layers.InstanceNorm3d, affine=True, track_running_stats=True), (4, 3, 2, 1, 2)),
}
MODES = pytest.mark.parametrize("reentrant", [True, False])
Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def checkpointed(reentrant: bool) -> Run:
    return lambda model, x: checkpoint(model, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


def nested(reentrant: bool) -> Run:
    once = checkpointed(reentrant)
    return lambda model, x: checkpoint(lambda inner: once(model, inner), x, use_reentrant=reentrant)  # type: ignore[no-any-return]


def trained(model: nn.Module, shape: tuple[int, ...], run: Run, steps: int = 2) -> dict[str, torch.Tensor]:
    """Return outputs, gradients and buffers after some steps."""
    random, result = torch.Generator().manual_seed(2), {}
    for step in range(steps):
        x = torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
        y = run(model, x)
        (y * torch.randn(y.shape, generator=random, dtype=torch.float64)).sum().backward()
        assert x.grad is not None
        result |= {f"output {step}": y.detach(), f"input gradient {step}": x.grad}
    result |= {f"{name} gradient": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return result | {name: buffer.clone() for name, buffer in model.named_buffers()}


def build(name: str, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    norm = NORMS[name][0](3, momentum=momentum, dtype=torch.float64)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


@pytest.mark.parametrize("name", NORMS)
@MODES
@pytest.mark.parametrize("nest", [checkpointed, nested])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_is_the_same_as_without(
    name: str, reentrant: bool, nest: Callable[[bool], Run], momentum: float | None
) -> None:
    shape = NORMS[name][1]
    found = trained(build(name, momentum), shape, nest(reentrant))
    wanted = trained(build(name, momentum), shape, plain)
    assert found["num_batches_tracked"] == 2
    assert {"running_mean", "running_var", "weight gradient", "bias gradient"} < found.keys()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@MODES
def test_torch_counts_twice(reentrant: bool) -> None:
    """A guard on the tests above: recomputation does call the layer again."""
    found = trained(nn.BatchNorm1d(3).double(), (4, 3), checkpointed(reentrant))
    assert found["num_batches_tracked"] == 4


@pytest.mark.parametrize("name", NORMS)
@MODES
def test_forward_passes_before_and_after_backward_count(name: str, reentrant: bool) -> None:
    norm, shape = build(name), NORMS[name][1]
    trained(norm, shape, checkpointed(reentrant), steps=1)
    norm(torch.randn(shape).double())
    trained(norm, shape, plain, steps=1)
    with torch.no_grad():
        checkpoint(norm, torch.randn(shape).double(), use_reentrant=False)
    assert norm.get_buffer("num_batches_tracked") == 4


@MODES
def test_inside_a_network(reentrant: bool) -> None:
    def network() -> nn.Sequential:
        torch.manual_seed(1)
        parts = [(nn.Linear(3, 3), layers.BatchNorm1d(3), nn.ReLU()) for _ in range(3)]
        return nn.Sequential(*(each for part in parts for each in part)).double()

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, nn.Sequential)
        return checkpoint_sequential(model, 3, x, use_reentrant=reentrant)

    torch.testing.assert_close(trained(network(), (6, 3), run), trained(network(), (6, 3), plain), rtol=0, atol=0)


@MODES
def test_with_padding(reentrant: bool) -> None:
    lengths = torch.tensor([5, 2, 0, 3])

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layers.BatchNorm(3, channel_dim=-1, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x, lengths=lengths)

    found = trained(Padded(), (4, 5, 3), checkpointed(reentrant))
    torch.testing.assert_close(found, trained(Padded(), (4, 5, 3), plain), rtol=0, atol=0)


@MODES
def test_eval_mode_moves_nothing(reentrant: bool) -> None:
    norm = build("BatchNorm1d").eval()
    trained(norm, (4, 3), checkpointed(reentrant))
    assert norm.get_buffer("num_batches_tracked") == 0
    assert norm.get_buffer("running_mean").tolist() == [0.0] * 3


def test_a_forward_pass_between_two_backward_passes_counts() -> None:
    norm = build("BatchNorm1d")
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
    loss = norm(gradient).pow(3).sum()
    loss.backward()
    assert norm.get_buffer("num_batches_tracked") == 2
