"""Masks that a norm's statistics leave padding out by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from normwise.facts.flow import Flow

__all__ = ["mask_like", "masks_behind", "nothing_masked"]

_CONE = 80


def mask_like(values: torch.Tensor) -> bool:
    """Whether floating-point numbers are nothing but 0, 1 and what hides a score: -1e3 or less."""
    return bool(((values == 0) | (values == 1) | (values <= -1e3)).all())


def masks_behind(flow: Flow, members: Iterable[int]) -> frozenset[int]:
    """Return the masks that ops read: truth values made of the data, or inputs of zeros and ones.

    Args:
        flow: the graph with taints.
        members: ids of the ops.
    """
    graph = flow.graph
    pending = [i for m in members for i in graph.ops[m].inputs]
    masks, seen = set(), set[int]()
    while pending and len(seen) < _CONE:
        value = pending.pop()
        if value in seen or flow.act[value] or not flow.data[value]:
            continue
        seen.add(value)
        record, op = graph.values[value], graph.producer(value)
        earlier = [] if op is None else [i for i in op.inputs if flow.data[i]]
        if record.dtype == "bool":
            earlier = [i for i in earlier if graph.values[i].dtype == "bool"]
        if not earlier and (record.dtype == "bool" or record.floating):
            masks.add(value)
        pending.extend(earlier)
    return frozenset(masks)


def nothing_masked(flow: Flow, masks: frozenset[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Yield the two ways to say that there is no padding: all true, all false."""
    for make in (torch.ones, torch.zeros):
        yield {m: make(flow.graph.values[m].shape, dtype=getattr(torch, _dtype(flow, m))) for m in masks}


def _dtype(flow: Flow, mask: int) -> str:
    return "bool" if flow.graph.values[mask].dtype == "bool" else "float64"
