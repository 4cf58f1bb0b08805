"""Recalibrated statistics are those of everything seen, and nothing else changes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from normwise import layers
from normwise.layers.statistics import update_statistics
from normwise.layers.sync_batch_norm import SyncBatchNorm

EXACT: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13}  # in float64
Statistics = tuple[torch.Tensor, torch.Tensor]


def batches(*sizes: int, shape: tuple[int, ...] = (3,), offset: float = 0.0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [
        torch.randn(size, *shape, generator=random, dtype=torch.float64) * (1 + step) + step + offset
        for step, size in enumerate(sizes)
    ]


def pooled(samples: torch.Tensor) -> Statistics:
    """Return mean and unbiased variance of [N, C]."""
    return samples.mean(0), samples.var(0)


def statistics(norm: nn.Module) -> Statistics:
    return norm.get_buffer("running_mean"), norm.get_buffer("running_var")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2), layers.BatchNorm1d(2)
    ).double()


NORMS: list[Callable[..., nn.Module]] = [
    nn.BatchNorm1d,
    nn.SyncBatchNorm,
    layers.BatchNorm1d,
    layers.BatchNorm,
    SyncBatchNorm,
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_pools_everything_seen(norm: Callable[..., nn.Module], momentum: float | None) -> None:
    layer = norm(3, momentum=momentum, dtype=torch.float64)
    layer.get_buffer("running_mean").fill_(float("nan"))  # what was there before does not matter
    data = batches(8, 8, 2)
    update_statistics(layer, data)
    torch.testing.assert_close(statistics(layer), pooled(torch.cat(data)), **EXACT)
    assert layer.get_buffer("num_batches_tracked") == 3


def test_differs_from_averages_over_batches() -> None:
    layer, data = nn.BatchNorm1d(3, momentum=None).double(), batches(8, 8, 2)
    torch.optim.swa_utils.update_bn(data, layer)
    mean, var = pooled(torch.cat(data))
    assert (layer.get_buffer("running_mean") - mean).abs().max() > 0.05
    assert (layer.get_buffer("running_var") / var - 1).abs().max() > 0.05


@pytest.mark.parametrize(("norm", "shape"), [(nn.BatchNorm1d, (3, 7)), (layers.BatchNorm2d, (3, 4, 2))])
def test_pools_over_all_axes_but_the_channels(norm: Callable[..., nn.Module], shape: tuple[int, ...]) -> None:
    layer, data = norm(3).double(), batches(4, 1, 6, shape=shape)
    update_statistics(layer, data)
    torch.testing.assert_close(statistics(layer), pooled(torch.cat(data).movedim(1, -1).flatten(0, -2)), **EXACT)


def test_a_large_offset_costs_no_digits() -> None:
    layer, data = nn.BatchNorm1d(3), [each.float() for each in batches(8, 8, 2, offset=1e4)]
    update_statistics(layer, data)
    mean, var = pooled(torch.cat(data).double())
    torch.testing.assert_close(layer.running_mean, mean.float(), rtol=0, atol=0)
    torch.testing.assert_close(layer.running_var, var.float(), rtol=3e-7, atol=0)


def test_single_precision_pools_many_batches_without_drift() -> None:
    layer, data = nn.BatchNorm1d(3), [each.float() for each in batches(*[16] * 300)]
    update_statistics(layer, data)
    mean, var = pooled(torch.cat(data).double())
    torch.testing.assert_close(layer.running_mean, mean.float(), rtol=2e-7, atol=0)
    torch.testing.assert_close(layer.running_var, var.float(), rtol=2e-7, atol=0)


def test_padding_does_not_count() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_mask = layers.BatchNorm(3, channel_dim=-1, dtype=torch.float64)
            self.by_lengths = layers.BatchNorm(3, channel_dim=-1, dtype=torch.float64)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            y = self.by_mask(x, mask=torch.arange(x.shape[1]) < lengths[:, None])
            return y + self.by_lengths(input=x, lengths=lengths)

    model, data = Masked(), batches(4, 2, shape=(5, 3))
    lengths = [torch.tensor([5, 2, 0, 3]), torch.tensor([0, 0])]
    real = [(torch.arange(5) < each[:, None]) for each in lengths]
    padded = [x.masked_fill(~keep[..., None], float("nan")) for x, keep in zip(data, real, strict=True)]
    update_statistics(model, list(zip(padded, lengths, strict=True)))
    wanted = pooled(torch.cat([x[keep] for x, keep in zip(data, real, strict=True)]))
    torch.testing.assert_close(statistics(model.by_mask), wanted, **EXACT)
    torch.testing.assert_close(statistics(model.by_lengths), wanted, **EXACT)


def test_nothing_real_leaves_statistics_alone() -> None:
    layer = layers.BatchNorm1d(2)
    layer(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    before = [each.clone() for each in statistics(layer)]
    update_statistics(layer, [{"input": torch.ones(3, 2), "mask": torch.zeros(3, dtype=torch.bool)}])
    torch.testing.assert_close(list(statistics(layer)), before)


def test_one_element_gives_a_mean_and_leaves_the_variance() -> None:
    layer = layers.BatchNorm1d(2)
    update_statistics(layer, [{"input": torch.ones(3, 2) * 7, "mask": torch.tensor([True, False, False])}])
    assert layer.get_buffer("running_mean").tolist() == [7.0, 7.0]
    assert layer.get_buffer("running_var").tolist() == [1.0, 1.0]


def test_later_layers_see_what_earlier_ones_normalized_with_the_batch() -> None:
    model, data = network().eval(), batches(8, 5, 2)
    update_statistics(model, data)
    hidden = [model[0](x) for x in data]
    second = torch.cat([model[3](nn.functional.batch_norm(h, None, None, training=True)) for h in hidden])
    torch.testing.assert_close(statistics(model[1]), pooled(torch.cat(hidden).detach()), **EXACT)
    torch.testing.assert_close(statistics(model[4]), pooled(second.detach()), **EXACT)


def test_a_layer_called_twice_pools_both_calls() -> None:
    norm = nn.BatchNorm1d(3).double()
    first, second = batches(8, 2)
    update_statistics(nn.Sequential(norm, norm), [first])
    again = nn.functional.batch_norm(first, None, None, training=True)
    torch.testing.assert_close(statistics(norm), pooled(torch.cat([first, again])), **EXACT)
    assert norm.num_batches_tracked == 2
    update_statistics(norm, [second])
    torch.testing.assert_close(statistics(norm), pooled(second), **EXACT)


# -- what is left as found ----------------------------------------------------------------------------------


class Stop(Exception):
    pass


def state_of(model: nn.Module) -> list[Any]:
    hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
    modes = [each.training for each in model.modules()]
    momenta = [getattr(each, "momentum", None) for each in model.modules()]
    return [hooks, modes, momenta, [parameter.grad for parameter in model.parameters()]]


def test_modes_hooks_and_momentum_are_left_as_found() -> None:
    model = network()
    model[4].eval()
    calls: list[int] = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    before, parameters = state_of(model), [each.detach().clone() for each in model.parameters()]
    update_statistics(model, batches(8, 5))
    assert state_of(model) == before
    assert calls == [1, 1]
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_a_failure_changes_nothing(error: type[BaseException]) -> None:
    def failing() -> Any:
        yield from batches(8, 5)
        raise error

    model = network().eval()
    before, state = copy.deepcopy(model.state_dict()), state_of(model)
    with pytest.raises(error):
        update_statistics(model, failing())
    assert state_of(model) == state
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_other_modules_run_in_the_mode_they_are_in() -> None:
    data = batches(64)
    results = []
    for training in (False, True):
        model = network().train(training)
        torch.manual_seed(5)
        update_statistics(model, data)
        results.append(model.get_buffer("4.running_var").clone())
    assert (results[0] - results[1]).abs().min() > 1e-3  # dropout adds variance


def test_keeps_no_graph() -> None:
    seen: list[bool] = []
    model = network()
    model[4].register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    update_statistics(model, batches(8))
    assert seen == [False]


# -- what a loader may yield --------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, x: torch.Tensor, other: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.norm(x + other) * scale


LABELS = torch.tensor([3])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, LABELS),
        lambda x: [x, LABELS],
        lambda x: {"input": x},
    ],
)
@pytest.mark.parametrize("outside", [lambda model: model, AveragedModel, nn.DataParallel])
def test_takes_inputs_and_leaves_labels(wrap: Callable[[Any], Any], outside: Callable[[Any], nn.Module]) -> None:
    norm, data = nn.BatchNorm1d(3).double(), batches(8, 2)
    model = outside(norm)
    update_statistics(model, [wrap(x) for x in data])
    (inner,) = (each for each in model.modules() if isinstance(each, nn.BatchNorm1d))
    torch.testing.assert_close(statistics(inner), pooled(torch.cat(data)), **EXACT)


def test_takes_as_many_inputs_as_forward_requires() -> None:
    model = TwoInputs()
    first, second = batches(8, 8)
    update_statistics(model, [(first, second, LABELS, "a name")])
    torch.testing.assert_close(statistics(model.norm), pooled(first + second), **EXACT)


def test_forward_says_how_to_run_a_batch() -> None:
    model = TwoInputs()
    (data,) = batches(8)
    update_statistics(model, [{"pixels": data}], forward=lambda model, batch: model(batch["pixels"], batch["pixels"]))
    torch.testing.assert_close(statistics(model.norm), pooled(2 * data), **EXACT)


def test_moves_tensors_to_a_device() -> None:
    seen: list[torch.device] = []
    model = nn.BatchNorm1d(3)
    batch = {"x": torch.ones(4, 3), "more": [torch.ones(1), "a name"]}

    def forward(model: nn.Module, batch: Any) -> None:
        seen.extend([batch["x"].device, batch["more"][0].device])
        assert batch["more"][1] == "a name"
        model(torch.randn(4, 3))

    update_statistics(model, [batch], forward=forward, device="meta")
    assert seen == [torch.device("meta")] * 2


def test_sees_through_compiled_models() -> None:
    model, data = network().eval(), batches(8, 5)
    compiled = torch.compile(model, backend="eager")
    compiled(data[0])  # compiled before there are hooks
    assert isinstance(compiled, nn.Module)
    update_statistics(compiled, data)
    torch.testing.assert_close(statistics(model[1]), pooled(model[0](torch.cat(data)).detach()), **EXACT)


# -- what it says when there is nothing to do ---------------------------------------------------------------


def test_says_that_there_is_no_batch_norm() -> None:
    model = nn.Sequential(nn.LayerNorm(3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ValueError, match="no batch norm with running statistics in Sequential; there is nothing to"):
        update_statistics(model, [torch.ones(2, 3)])


def test_says_that_the_loader_is_empty() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=re.escape("yields no batch; pass a list or a DataLoader: an iterator that")):
        update_statistics(model, [])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_warns_of_layers_the_pass_does_not_reach() -> None:
    model = network()
    norms = nn.ModuleDict({name: nn.BatchNorm1d(2) for name in "abcd"})
    model[0].add_module("unused", norms)
    with pytest.warns(
        UserWarning, match=r"left 4 batch norms as they were.*: 0.unused.a, .*c and 1 more; pass forward="
    ):
        update_statistics(model, batches(8))
    assert norms["a"].get_buffer("num_batches_tracked") == 0
    assert model[1].num_batches_tracked == 1
