"""Memory: what is kept for the backward pass, and the most that was held at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["peak_bytes", "saved_bytes"]


def saved_bytes(call: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the storages that a forward pass keeps for its backward pass, each counted once.

    Args:
        call: the forward pass.
        parameters: held anyway, so their storages do not count.

    Examples:
        >>> x = torch.ones(10, requires_grad=True)
        >>> saved_bytes(lambda: x.exp() + x[:5].exp().sum(), [])
        60
    """
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage
        return tensor.detach()  # the tensor itself, if it is the output, would keep its own graph alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    total = sum(storage.nbytes() for at, storage in held.items() if at not in own)
    del out
    return total


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes of tensors that a call held at once, beyond those held before it.

    On a CPU every allocation and release of torch's allocator is recorded by its profiler; memory that others
    allocate (a compiled library's own buffers) is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _silent(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    recorded: Any = profile.profiler and profile.profiler.kineto_results
    changes = sorted((each.start_ns(), each.nbytes()) for each in recorded.events() if each.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


@contextmanager
def _silent() -> Iterator[None]:
    """Close standard error to the profiler's C++, which says there that it starts and stops."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
