"""How near two computations are to the same one in float64."""

from __future__ import annotations

import torch

__all__ = ["ROUNDINGS", "error", "relative_error", "worse"]

# How many roundings of the dtype we may be farther from float64 than twice torch's distance. Of float64 itself
# torch's distance is 0 by definition: what both lose to groups of a few numbers far from 0 is allowed here.
ROUNDINGS = {torch.float64: 500, torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}

Results = dict[str, torch.Tensor]


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest difference."""
    return (found.detach().double() - truth.detach().double()).abs().max().item() if truth.numel() else 0.0


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest difference, as a share of the largest number."""
    return error(found, truth) / truth.detach().abs().max().item()


def worse(ours: Results, theirs: Results, truth: Results) -> list[str]:
    """Return what is farther from float64 than torch's, by more than roundings of the dtype it is stored in."""
    assert list(ours) == list(theirs) == list(truth)
    told = []
    for name, value in ours.items():
        if value.dtype != theirs[name].dtype or value.shape != theirs[name].shape:
            told.append(f"{name}: {value.dtype} {list(value.shape)}")
        elif not value.is_floating_point():
            told += [] if torch.equal(value, theirs[name]) else [f"{name}: {value} for {theirs[name]}"]
        elif value.numel():
            rounding = torch.finfo(value.dtype).eps * truth[name].abs().max().clamp_min(1.0).item()
            allowed = 2 * error(theirs[name], truth[name]) + ROUNDINGS[value.dtype] * rounding
            if not error(value, truth[name]) <= allowed:
                told.append(f"{name}: {error(value, truth[name]):.3g} from float64, {allowed:.3g} allowed")
    return told
