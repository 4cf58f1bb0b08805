"""Padding takes no part in outputs, gradients or running statistics, whatever it holds and however much there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normwise import functional as nf
from normwise import layers
from normwise.spec import NormSpec, Scope, Statistic, Weight

C, T = 4, 6
OVER_TIME = NormSpec(scope=Scope.OTHER, axes=(-1,), center=True, statistic=Statistic.VARIANCE, weight=Weight.NONE)

# Each takes x [N, C, T] and a mask [N, T]; the first keeps one statistic for all samples, the others one a sample.
SEQUENCE_NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "batch": lambda x, mask: nf.batch_norm(x, training=True, mask=mask),
    "instance": lambda x, mask: nf.instance_norm(x, mask=mask),
    "group": lambda x, mask: nf.group_norm(x, 2, mask=mask),
    "over time": lambda x, mask: nf.norm(OVER_TIME, x, mask=mask[:, None]),
}
PADDING = st.sampled_from([float("nan"), float("inf"), -1e30, 7.0])
every_norm = pytest.mark.parametrize("norm", SEQUENCE_NORMS.values(), ids=SEQUENCE_NORMS)


@st.composite
def padded(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw x [N, C, T] in float64 and lengths [N], none below 2."""
    lengths = draw(st.lists(st.integers(2, T), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    offset = draw(st.sampled_from([0.0, 3.0, -100.0]))
    return torch.randn(len(lengths), C, T, generator=generator, dtype=torch.float64) + offset, torch.tensor(lengths)


def filled(x: torch.Tensor, mask: torch.Tensor, value: float) -> torch.Tensor:
    return x.masked_fill(~mask[:, None], value)


@every_norm
@given(drawn=padded(), value=PADDING)
def test_what_the_padding_holds_changes_no_bit(norm: Any, drawn: Any, value: float) -> None:
    x, lengths = drawn
    mask = nf.mask_of_lengths(lengths, T)
    y = norm(filled(x, mask, value), mask)
    assert torch.equal(y, norm(filled(x, mask, 0.0), mask))
    assert y.masked_select(~mask[:, None]).eq(0).all()


@every_norm
@given(drawn=padded(), value=PADDING, more=st.integers(1, 5))
def test_how_much_padding_there_is_changes_nothing(norm: Any, drawn: Any, value: float, more: int) -> None:
    x, lengths = drawn
    longer = torch.cat([x, torch.full((len(x), C, more), value, dtype=torch.float64)], -1)
    y = norm(longer, nf.mask_of_lengths(lengths, T + more))
    torch.testing.assert_close(y[..., :T], norm(x, nf.mask_of_lengths(lengths, T)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["instance", "group", "over time"])
@given(drawn=padded())
def test_masking_is_dropping_the_tokens_of_a_sample(name: str, drawn: Any) -> None:
    x, lengths = drawn
    y = SEQUENCE_NORMS[name](x, nf.mask_of_lengths(lengths, T))
    for index, length in enumerate(lengths.tolist()):
        alone = x[index : index + 1, :, :length]
        right = SEQUENCE_NORMS[name](alone, torch.ones(1, length, dtype=torch.bool))
        torch.testing.assert_close(y[index : index + 1, :, :length], right, rtol=1e-11, atol=1e-11)


@given(drawn=padded(), value=PADDING)
def test_masking_is_dropping_the_tokens_of_a_batch_running_statistics_included(drawn: Any, value: float) -> None:
    x, lengths = drawn
    mask = nf.mask_of_lengths(lengths, T)
    masked, dropped = (layers.BatchNorm(C, dtype=torch.float64) for _ in range(2))
    y = masked(filled(x, mask, value), lengths=lengths).movedim(1, -1)[mask]
    torch.testing.assert_close(y, dropped(x.movedim(1, -1)[mask]), rtol=1e-11, atol=1e-11)
    for name, kept in dropped.state_dict().items():
        torch.testing.assert_close(masked.state_dict()[name], kept, rtol=1e-11, atol=1e-11)


@every_norm
@given(drawn=padded(), value=PADDING)
def test_padding_has_no_gradient_and_gives_none(norm: Any, drawn: Any, value: float) -> None:
    x, lengths = drawn
    mask = nf.mask_of_lengths(lengths, T)
    gradients = []
    for each in (value, 0.0):
        point = filled(x, mask, each).requires_grad_()
        gradients.append(torch.autograd.grad(norm(point, mask).pow(3).sum(), point)[0])
    assert torch.equal(*gradients)
    assert gradients[0].isfinite().all()
    assert gradients[0].masked_select(~mask[:, None]).eq(0).all()


@given(drawn=padded(), seed=st.integers(0, 100))
def test_the_order_of_samples_and_tokens_does_not_matter(drawn: Any, seed: int) -> None:
    x, lengths = drawn
    mask = nf.mask_of_lengths(lengths, T)
    generator = torch.Generator().manual_seed(seed)
    samples, steps = torch.randperm(len(x), generator=generator), torch.randperm(T, generator=generator)
    for norm in SEQUENCE_NORMS.values():
        moved = norm(x[samples][..., steps], mask[samples][:, steps])
        torch.testing.assert_close(moved, norm(x, mask)[samples][..., steps], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("make", [layers.BatchNorm1d, layers.InstanceNorm1d, layers.SyncBatchNorm])
def test_a_batch_of_padding_leaves_running_statistics_alone(make: Any, momentum: float | None) -> None:
    norm = make(C, track_running_stats=True, affine=True, momentum=momentum)
    norm(torch.randn(3, C, T))
    before = [each.clone() for each in norm.buffers()]
    x = torch.full((3, C, T), float("nan"), requires_grad=True)
    y = norm(x, mask=torch.zeros(3, T, dtype=torch.bool))
    y.sum().backward()
    assert y.eq(0).all()
    assert x.grad is not None
    assert x.grad.eq(0).all()
    assert norm.weight.grad.eq(0).all()
    assert all(map(torch.equal, before, norm.buffers()))


def test_a_batch_of_padding_is_not_averaged_in() -> None:
    norm = layers.BatchNorm1d(C, momentum=None)
    norm(torch.full((3, C, T), float("nan")), lengths=torch.zeros(3, dtype=torch.long))
    norm(torch.full((3, C, T), 5.0))
    assert norm.get_buffer("running_mean").tolist() == [5.0] * C


def test_a_batch_counts_for_its_real_elements_not_for_its_size() -> None:
    x = torch.randn(2, C, T, dtype=torch.float64)
    norm = layers.InstanceNorm1d(C, track_running_stats=True, momentum=1.0, dtype=torch.float64)
    norm(x, lengths=torch.tensor([6, 2]))
    means = torch.stack([x[0].mean(-1), x[1, :, :2].mean(-1)])
    torch.testing.assert_close(norm.running_mean, (6 * means[0] + 2 * means[1]) / 8, rtol=1e-12, atol=1e-12)
