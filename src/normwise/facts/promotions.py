"""Tells casts that round a result from casts that widen the operands of a product."""

from __future__ import annotations

from normwise.facts import vocabulary as ops
from normwise.facts.flow import Flow
from normwise.graph import Op

__all__ = ["rounds"]

_STEPS = 4


def rounds(flow: Flow, value: int, dtype: str) -> bool:
    """Whether a value is cast to round it to the dtype of a norm's input, and not as part of a product.

    In (a.float() * b.float()).to(dtype) the first two casts say in which dtype the product is taken; where the
    values are float32 already, such a cast looks like one back to the dtype of the input.

    Args:
        flow: the graph with taints.
        value: what may be rounded.
        dtype: of the norm's input.
    """
    casts = flow.casts_of(value)
    changing = [c for c in casts if c.outputs]
    if not changing and flow.graph.values[value].dtype != dtype:
        return False  # without effect: it was not this norm's input that came in a narrower dtype
    closing = int(not changing and _is_widened_product(flow, value))
    return len(casts) > len(_promotions(flow, value, casts)) + closing


def _is_widened_product(flow: Flow, value: int) -> bool:
    op = flow.graph.producer(value)
    return (
        op is not None
        and op.short in ops.MUL | ops.ADD
        and len(op.inputs) == 2
        and all(_cast_too(flow, i, flow.graph.values[value].dtype, steps=1) for i in op.inputs)
    )


def _promotions(flow: Flow, value: int, casts: list[Op]) -> set[int]:
    """Return the casts of a value that prepare it for a product or sum."""
    found = set()
    for cast in casts:
        result = cast.outputs[0] if cast.outputs else value
        for op in flow.graph.consumers(result):
            before = [c.id for c in casts if c.id < op.id]
            if (
                op.short in ops.MUL | ops.ADD
                and before
                and before[-1] == cast.id
                and any(
                    _cast_too(flow, other, flow.graph.values[result].dtype) for other in op.inputs if other != result
                )
            ):
                found.add(cast.id)
    return found


def _cast_too(flow: Flow, value: int, dtype: str, steps: int = _STEPS) -> bool:
    """Whether an operand, or the one value it was computed from, was cast to the dtype."""
    for _ in range(steps):
        if flow.graph.values[value].dtype == dtype and flow.casts_of(value):
            return True
        op = flow.graph.producer(value)
        if op is None or len(op.inputs) != 1:
            return False
        if op.short in ops.RECAST:
            return flow.graph.values[op.outputs[0]].dtype == dtype
        if op.short not in ops.POINTWISE | ops.VIEW:
            return False
        value = op.inputs[0]
    return False
