"""Batch norms with running statistics, written out by hand."""

from __future__ import annotations

from collections.abc import Iterator

from normwise.facts import vocabulary
from normwise.facts.affine import follow
from normwise.facts.calls import NormCall, parameter_of
from normwise.facts.flow import Flow
from normwise.facts.records import Evidence
from normwise.graph import Ref, ValueKind
from normwise.spec import NormSpec, Scope, Statistic, Weight

__all__ = ["frozen_calls"]


def frozen_calls(flow: Flow, taken: set[int]) -> Iterator[NormCall]:
    """Yield x * f(rsqrt(buffer)) + g: a batch norm with running statistics, written out."""
    graph = flow.graph
    for op in graph.ops:
        if op.id in taken or op.short not in (vocabulary.MUL | vocabulary.DIV) or len(op.inputs) != 2 or not op.outputs:
            continue
        acts = flow.acts(op)
        others = [i for i in op.inputs if not flow.act[i]]
        if len(acts) != 1 or len(others) != 1:
            continue
        found = _root_of_buffer(flow, others[0])
        if found is None:
            continue
        variance, eps = found
        source = acts[0]
        producer = graph.producer(source)
        members = {op.id}
        center = False
        if producer is not None and producer.short in vocabulary.SUB and any(not flow.act[i] for i in producer.inputs):
            source, center = flow.acts(producer)[0], True
            members.add(producer.id)
        affine = follow(flow, op.outputs[0], width=graph.values[source].shape)
        ndim = len(graph.values[source].shape)
        spec = NormSpec(
            scope=Scope.BATCH,
            axes=(-ndim, *range(2 - ndim, 0)) if ndim >= 2 else (-1,),
            center=center or affine.bias is not None,
            statistic=Statistic.VARIANCE,
            eps=eps,
            weight=Weight.VECTOR,
            bias=affine.bias is not None,
            running=True,
            stats_dtype=graph.values[variance].dtype,
        )
        yield NormCall(
            op=op,
            input=source,
            core=op.outputs[0],
            output=affine.output,
            spec=spec,
            call=op.call,
            native=False,
            evidence=Evidence.DERIVED,
            members=frozenset(members) | affine.members,
            weight=parameter_of(flow, others[0]),
            bias=parameter_of(flow, affine.bias),
            running_var=variance,
            uses_batch=False,
            note="running statistics, written out (frozen batch norm)",
        )


def _root_of_buffer(flow: Flow, value: int) -> tuple[int, float | None] | None:
    """Return the buffer and eps under a square root that a value was made from, without any activation."""
    graph = flow.graph
    pending, rooted, eps, seen = [value], False, None, 0
    buffers: list[int] = []
    while pending and seen < 24:
        current = pending.pop()
        seen += 1
        record = graph.values[current]
        if record.kind is ValueKind.BUFFER and record.floating and record.numel > 1:
            buffers.append(current)
        op = graph.producer(current)
        if op is None:
            continue
        if op.short in ("rsqrt", "sqrt") or (op.short == "pow" and op.args[1] in (-0.5, 0.5)):
            rooted = True
            under = graph.producer(op.inputs[0])
            if under is not None and under.short == "add":
                numbers = [a for a in under.args if isinstance(a, float)] + [
                    graph.values[a.value].scalar
                    for a in under.args
                    if isinstance(a, Ref) and graph.values[a.value].scalar is not None
                ]
                eps = numbers[0] if numbers else None
        pending.extend(i for i in op.inputs if not flow.act[i])
    return (buffers[-1], eps) if rooted and buffers else None
