"""What broke when someone tried to break the layers."""

from __future__ import annotations

import pytest
import torch

from normwise.layers import BatchNorm1d, FrozenBatchNorm, InstanceNorm1d, Norm
from normwise.spec import Gate, Modulation, NormSpec

SPECS = {
    "gate after": (NormSpec(axes=(-2, -1), gate=Gate.AFTER), ("gate",)),
    "gate before": (NormSpec(axes=(-2, -1), gate=Gate.BEFORE), ("gate",)),
    "scale and shift": (NormSpec(axes=(-2, -1), modulation=Modulation.SCALE_SHIFT), ("scale", "shift")),
}


@pytest.mark.parametrize("name", SPECS)
def test_nan_in_an_operand_at_padding_reaches_no_output_and_no_gradient(name: str) -> None:
    spec, operands = SPECS[name]
    layer = Norm(spec, (5, 4), dtype=torch.float64)
    mask = torch.ones(2, 5, 1, dtype=torch.bool)
    mask[1, 3:] = False
    values = {each: torch.randn(2, 5, 4, dtype=torch.float64) for each in ("input", *operands)}
    results = []
    for fill in (0.0, float("nan")):
        given = {each: value.masked_fill(~mask, fill).requires_grad_() for each, value in values.items()}
        y = layer(**given, mask=mask)
        results.append([y, *torch.autograd.grad(y.pow(3).sum(), list(given.values()))])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
        assert (poisoned[1, 3:] == 0).all()


def test_an_empty_batch_does_not_dilute_the_mean_of_all_batches() -> None:
    norm, x = BatchNorm1d(3, momentum=None), torch.randn(8, 3)
    norm(torch.randn(0, 3))
    norm(torch.randn(0, 3), mask=torch.ones(1, 1, dtype=torch.bool))
    norm(x)
    assert norm.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_mean, x.mean(0))


def test_a_refused_batch_does_not_dilute_the_mean_of_all_batches() -> None:
    norm, x = BatchNorm1d(3, momentum=None), torch.randn(8, 3)
    with pytest.raises(ValueError, match="one value per channel"):
        norm(torch.randn(1, 3))
    norm(x)
    torch.testing.assert_close(norm.running_mean, x.mean(0))


def test_an_instance_norm_counts_no_empty_and_no_refused_batch() -> None:
    norm, x = InstanceNorm1d(3, momentum=None, track_running_stats=True), torch.randn(2, 3, 7)
    norm(torch.randn(0, 3, 4))
    with pytest.raises(ValueError, match="one value per sample"):
        norm(torch.randn(2, 3, 1))
    norm(x)
    torch.testing.assert_close(norm.running_mean, x.mean((0, 2)))


def test_a_frozen_norm_that_was_built_without_storage_starts_neutral() -> None:
    norm = FrozenBatchNorm(3, eps=0.0, device="meta").to_empty(device="cpu")
    for buffer in norm.buffers():
        buffer.fill_(7.0)
    norm.reset_parameters()
    x = torch.randn(4, 3)
    assert torch.equal(norm(x), x)
