"""Places where an activation appears that no traced op produced."""

from __future__ import annotations

from normwise.facts import vocabulary as ops
from normwise.facts.flow import Flow
from normwise.facts.records import Break
from normwise.graph import OPAQUE, ValueKind
from normwise.rendering import both

__all__ = ["find"]


def find(flow: Flow) -> tuple[Break, ...]:
    """Return the breaks: bridged modules, and constants of an activation's shape that meet activations."""
    graph, found = flow.graph, {}
    for op in graph.ops:
        at = (graph.path(op), str(op.source) if op.source else None)
        if op.name == OPAQUE:
            found.setdefault(
                at,
                both(
                    "the output was computed outside torch; joined to the module's input",
                    "输出在 torch 之外算出，已与该模块的输入接上",
                ),
            )
            continue
        shapes = {graph.values[i].shape for i in op.inputs if flow.act[i]}
        for value in op.inputs:
            record = graph.values[value]
            lost = record.kind is ValueKind.CONST and record.floating and len(record.shape) >= 2 and record.shape[0] > 1
            meets = record.shape in shapes and op.short in ops.ADD | ops.SUB | ops.MUL | ops.DIV
            starts = op.short in ops.LINEAR and value == op.inputs[0] and any(flow.learned[i] for i in op.inputs)
            if lost and (meets or starts):
                shape = list(record.shape)
                found.setdefault(
                    at,
                    both(
                        f"an activation of shape {shape} that no traced op produced",
                        f"形状为 {shape} 的激活，并非由任何跟踪到的操作算出",
                    ),
                )
    return tuple(Break(path=path, source=source, what=what) for (path, source), what in found.items())
