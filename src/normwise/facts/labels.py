"""Names the axes of every value by tracing again with another batch size and another time length."""

from __future__ import annotations

from dataclasses import replace

from normwise.errors import NotKnown
from normwise.graph import Graph, Recording, ValueKind, trace
from normwise.rendering import both
from normwise.targets import inputs
from normwise.targets.target import Target

__all__ = ["Labels", "counts_tokens", "read", "time_varies"]

Labels = dict[int, tuple[str, ...]]

_CUT = 3  # steps by which several sequences are cut


def read(target: Target, recording: Recording) -> Labels:
    """Return the label of each axis by value id, from at most two more passes.

    Labels are "batch", "time", "batch*time", "space", "hidden" and "unknown". A model that cannot run with
    another size (a batch norm over a fixed number of steps) is labelled up to where it stopped;
    a value that is missing was not reached.

    Raises:
        NotKnown: neither the batch nor the time of the inputs can be varied.
    """
    changed: dict[str, tuple[Graph, set[int]]] = {}
    for name, call in (("batch", inputs.with_batch(target, 3)), ("time", _other_time(target))):
        if call is None:
            continue
        varied = trace(replace(target, args=call[0], kwargs=call[1]), partial=True).graph
        changed[name] = (varied, _same_values(recording.graph, varied))
    if not changed:
        raise NotKnown(
            both(
                "the axes cannot be told apart: neither batch nor time of the inputs could be varied",
                "无法区分各轴：输入的批次和时间都无法改变",
            )
        )
    return {
        v.id: label for v in recording.graph.values if (label := _label(v.id, recording.graph, changed)) is not None
    }


def time_varies(target: Target) -> bool:
    """Whether the inputs have a time axis of which another length can be made: without, no axis is named "time"."""
    return _other_time(target) is not None


def counts_tokens(graph: Graph) -> bool:
    """Whether an integer input [B, T] says which axis is time."""
    given = (v for v in graph.values if v.kind is ValueKind.INPUT)
    return any(not v.floating and v.dtype != "bool" and len(v.shape) == 2 for v in given)


def _other_time(target: Target) -> tuple[tuple[object, ...], dict[str, object]] | None:
    for steps in (7, 5, 17):
        call = inputs.with_time(target, steps)
        if call is not None and _sizes(call) != _sizes((target.args, dict(target.kwargs))):
            return call
    if len(inputs.lengths_of(target)) > 1:  # an encoder and a decoder, each with a sequence of its own length
        return inputs.with_shorter_times(target, _CUT)
    return None


def _sizes(call: object) -> list[tuple[int, ...]]:
    from normwise.graph.capture import tensors_in

    return [tuple(t.shape) for t in tensors_in(call)]


def _same_values(first: Graph, second: Graph) -> set[int]:
    """Return the values that both runs made by the same ops."""
    same: set[int] = set()
    for a, b in zip(first.ops, second.ops, strict=False):
        if a.name != b.name or a.inputs != b.inputs or len(a.outputs) != len(b.outputs):
            break
        same.update(i for i in (*a.inputs, *a.outputs) if i < len(second.values))
    return {i for i in same if len(first.values[i].shape) == len(second.values[i].shape)}


def _label(value: int, graph: Graph, changed: dict[str, tuple[Graph, set[int]]]) -> tuple[str, ...] | None:
    if not any(value in same for _, same in changed.values()):
        return None
    shape = graph.values[value].shape
    names = []
    for axis, size in enumerate(shape):
        moved = [n for n, (other, same) in changed.items() if value in same and other.values[value].shape[axis] != size]
        unseen = any(value not in same for _, same in changed.values())
        names.append("*".join(moved) if moved else "unknown" if unseen else "hidden")
    if len(shape) >= 4 and names[0] == "batch" and not any("time" in n for n in names):
        names[2:] = ["space"] * (len(shape) - 2)
    return tuple(names)
