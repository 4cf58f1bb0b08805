"""What a model returns, tensor by tensor with names, and how far two models' answers are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from normwise.facts.differences import changes

__all__ = ["Outputs", "attached_floats", "centred", "floats_in", "gap", "lost_at", "ratios"]

Outputs = dict[str, torch.Tensor]
_NEGLIGIBLE = 1e-8  # of the largest output: what is smaller is measured against that much of it
_DEEPEST = 6
_LOST = 1e-9


def floats_in(output: Any) -> Outputs:
    """Return the floating tensors of what a model returned, by name; caches and other objects are looked into."""
    return {name: tensor.detach() for name, tensor in attached_floats(output)}


def attached_floats(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what ``floats_in`` returns, with its history."""
    return _named(output, "", 0, set())


def _named(item: Any, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(item, torch.Tensor):
        if item.is_floating_point() or item.is_complex():
            yield name or "output", item
        return
    if depth > _DEEPEST or id(item) in seen:
        return
    seen = seen | {id(item)}
    if isinstance(item, Mapping):
        parts = [(f"{name}.{key}" if name else str(key), value) for key, value in item.items()]
    elif isinstance(item, (list, tuple)):
        parts = [(f"{name}[{i}]", value) for i, value in enumerate(item)]
    elif hasattr(item, "__dict__") and not isinstance(item, (type, nn.Module)) and not callable(item):
        parts = [(f"{name}.{key}" if name else key, value) for key, value in vars(item).items()]
    else:
        return
    for label, value in parts:
        yield from _named(value, label, depth + 1, seen)


def ratios(first: Outputs, second: Outputs) -> dict[str, float]:
    """Return max|difference| / max|first| of every output; infinity where one is missing or has another shape."""
    sizes = {name: _largest(tensor) for name, tensor in first.items()}
    least = _NEGLIGIBLE * max(sizes.values(), default=0.0)
    found = dict.fromkeys([*first, *second], math.inf)
    for name, tensor in first.items():
        other = second.get(name)
        if other is not None and other.shape == tensor.shape:
            apart = float(changes(tensor, other).max()) if tensor.numel() else 0.0
            size = max(sizes[name], least)
            found[name] = 0.0 if apart == 0 else apart / size if size else math.inf
    return found


def centred(outputs: Outputs, axes: Mapping[str, int]) -> Outputs:
    """Return the outputs with the mean over an axis taken from some."""
    return {n: t - t.mean(axes[n], keepdim=True) if n in axes else t for n, t in outputs.items()}


def gap(first: Outputs, second: Outputs) -> float:
    """Return the largest of ``ratios``."""
    return max(ratios(first, second).values(), default=0.0)


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def lost_at(first: nn.Module, second: nn.Module, run: Any) -> tuple[str | None, str] | None:
    """Return the last module on whose output two models agree, and the module after it.

    Modules that a conversion changed on purpose may disagree before that: a later one agrees again.

    Args:
        first: a model.
        second: its conversion.
        run: calls the model that it is given.
    """
    one, other = (_module_outputs(model, run) for model in (first, second))
    shared = [key for key in one if key in other]
    agree = [gap({"": one[key]}, {"": other[key]}) <= _LOST for key in shared]
    if all(agree):
        return None
    last = max((i for i, same in enumerate(agree) if same), default=-1)
    if last + 1 == len(shared):
        return None
    return (shared[last][0] if last >= 0 else None), shared[last + 1][0]


def _module_outputs(model: nn.Module, run: Any) -> dict[tuple[str, int], torch.Tensor]:
    """Return the first floating tensor that each call of each module returned, in the order in which they ended."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    calls: dict[str, int] = {}

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = next(iter(floats_in(output).values()), None)
            calls[path] = calls.get(path, 0) + 1
            if tensor is not None:
                found[path, calls[path]] = tensor

        return hook

    handles = [m.register_forward_hook(watch(path)) for path, m in model.named_modules() if path]
    try:
        run(model)
    finally:
        for handle in handles:
            handle.remove()
    return found
