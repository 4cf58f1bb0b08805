"""Casts a copy of a target to another dtype or device; what the user gave is never changed."""

from __future__ import annotations

import copy
import dataclasses
from itertools import chain
from typing import Any

import torch
from torch import nn

from normwise.errors import TargetError
from normwise.targets.inputs import map_tensors
from normwise.targets.target import Target, numberless

__all__ = ["cast"]


def cast(target: Target, device: torch.device | str | None = None) -> Target:
    """Return the target in ``target.dtype`` on ``device``, or itself where that is what it is already.

    The optimizer is copied along, so that its groups hold the parameters of the copy.

    Args:
        target: its floating parameters, buffers and inputs are cast.
        device: None leaves everything where it is.

    Raises:
        TargetError: the model cannot be copied, or the device is not there.
    """
    device = _device(device)
    if not any(_differs(tensor, target.dtype, device) for tensor in _all_tensors(target)):
        return target
    model, optimizer = _copied(target)
    try:
        model.to(device=device, dtype=target.dtype)
        args, kwargs = map_tensors((target.args, dict(target.kwargs)), lambda t: _moved(t, target.dtype, device))
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise TargetError(f"{target.name} cannot be moved to {device or target.dtype}: {error}") from error
    note = f"a copy was cast to {str(target.dtype).removeprefix('torch.')}" if target.dtype else f"a copy on {device}"
    return dataclasses.replace(
        target, model=model, optimizer=optimizer, args=args, kwargs=kwargs, notes=(*target.notes, note)
    )


def _device(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except RuntimeError as error:
        raise TargetError(f"{device!r} is no device; give for example cpu, cuda or cuda:1") from error


def _copied(target: Target) -> tuple[nn.Module, Any]:
    held = chain(target.model.parameters(), target.model.buffers())
    if any(numberless(tensor) and not tensor.is_meta for tensor in held):
        raise TargetError(f"{target.name} has no numbers, so it cannot be cast; give it weights")
    try:
        return copy.deepcopy((target.model, target.optimizer))
    except Exception as error:
        raise TargetError(
            f"{target.name} cannot be copied, and normwise casts only copies ({error}); cast it before the check"
        ) from error


def _all_tensors(target: Target) -> list[torch.Tensor]:
    found = [*target.model.parameters(), *target.model.buffers()]
    map_tensors((target.args, dict(target.kwargs)), lambda tensor: found.append(tensor) or tensor)
    return found


def _differs(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device | None) -> bool:
    if device is not None:
        index = tensor.device.index if device.index is None else device.index  # "cuda" is any of them
        if tensor.device != torch.device(device.type, index):
            return True
    return dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype


def _moved(tensor: torch.Tensor, dtype: torch.dtype | None, device: torch.device | None) -> torch.Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
