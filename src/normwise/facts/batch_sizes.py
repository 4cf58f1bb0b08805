"""How many values stand under each batch statistic, for a batch size that was not run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from normwise.errors import NotKnown
from normwise.graph.capture import tensors_in
from normwise.rendering import both

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["values_per_channel"]


def values_per_channel(facts: Facts, batch: int | None = None) -> Mapping[str, int]:
    """Return, by path, how many values of a channel each norm with running statistics sees.

    Read off the traced run: a batch of another size has proportionally more or fewer values, as long as the number
    of the traced run is a multiple of its batch size.

    Args:
        facts: of the target.
        batch: samples in the batch; None: as in the example inputs.

    Raises:
        NotKnown: the model was not traced, or its inputs have no batch.
    """
    graph = facts.traced.graph
    inputs = (*facts.target.args, *facts.target.kwargs.values())
    first = next((t for t in tensors_in(inputs) if t.dim() and t.shape[0]), None)
    if first is None:
        raise NotKnown(both("the inputs have no axis of samples", "输入没有样本轴"))
    channels = {r.path: r.var.numel() for r in facts.running}
    numbers: dict[str, int] = {}
    for call in graph.calls:
        of = channels.get(call.path)
        if not of or not call.inputs:
            continue
        here = graph.values[call.inputs[0]].numel // of
        if batch is not None:
            if here % first.shape[0]:
                continue  # not a multiple of the batch: the model reshapes it
            here = here // first.shape[0] * batch
        numbers[call.path] = min(here, numbers.get(call.path, here))
    return numbers
