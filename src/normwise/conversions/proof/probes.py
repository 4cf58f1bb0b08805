"""Inputs on which a twin and its conversion are compared, beside the example inputs: edges where mistakes hide."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from normwise.facts.records import NormSite
from normwise.targets import Target
from normwise.targets.inputs import map_tensors, size_of, with_batch, with_time

__all__ = ["Probe", "of_target", "sizes_of_eps"]

_MOST_EPS = 3
_TINY = 1e-3  # a variance of 1e-6, where eps counts
_PADDING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One call of a model."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def of_target(target: Target) -> Iterator[Probe]:
    """Yield the example inputs, then tiny and constant ones, other batches and lengths, and padding."""
    given = (target.args, dict(target.kwargs))
    yield Probe(name="inputs", args=given[0], kwargs=given[1])
    yield from _changed("tiny inputs", given, lambda t: t * _TINY if t.is_floating_point() else t)
    yield from _changed("constant inputs", given, _constant)
    for name, resized in (("batch", with_batch), ("time", with_time)):
        size = size_of(target, name)
        for other in {1, size + 1} - {size} if size else ():
            call = resized(target, other)
            if call is not None:
                yield Probe(name=f"{name} of {other}", args=call[0], kwargs=call[1])
    yield from _padded(target)


def sizes_of_eps(norms: tuple[NormSite, ...]) -> list[float]:
    """Return the values of eps that the norms have, a few at most."""
    return sorted({site.spec.eps for site in norms if site.spec and site.spec.eps}, reverse=True)[:_MOST_EPS]


def _changed(name: str, given: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Probe]:
    changed: list[bool] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        new = change(tensor)
        changed.append(new is not tensor)
        return new

    args, kwargs = map_tensors(given, noted)
    if any(changed):
        yield Probe(name=name, args=args, kwargs=kwargs)


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    """Return one number everywhere; masks and flags, which have two values at most, stay."""
    if tensor.dtype is torch.bool or tensor.numel() < 2 or tensor.is_complex() or len(tensor.unique()) <= 2:
        return tensor
    return torch.full_like(tensor, tensor.flatten()[0].item())


def _padded(target: Target) -> Iterator[Probe]:
    """Yield the inputs with the last steps of the first sample hidden by the attention mask."""
    ids = next((t for t in target.kwargs.values() if isinstance(t, torch.Tensor) and _are_ids(t)), None)
    ids = (
        ids if ids is not None else next((t for t in target.args if isinstance(t, torch.Tensor) and _are_ids(t)), None)
    )
    if ids is None or ids.shape[1] <= _PADDING + 1 or not _takes_mask(target):
        return
    given = target.kwargs.get("attention_mask")
    mask = torch.ones_like(ids) if given is None else given.clone()
    if mask.shape == ids.shape:
        mask[0, -_PADDING:] = 0
        yield Probe(name="padding", args=target.args, kwargs={**target.kwargs, "attention_mask": mask})


def _are_ids(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and tensor.dtype is not torch.bool


def _takes_mask(target: Target) -> bool:
    if "attention_mask" in target.kwargs:
        return isinstance(target.kwargs["attention_mask"], torch.Tensor)
    try:
        return "attention_mask" in inspect.signature(target.model.forward).parameters
    except (TypeError, ValueError):  # a forward without a readable signature
        return False
