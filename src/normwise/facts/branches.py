"""How often each norm runs on the inputs of one rank and on those of another."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from normwise.errors import NormwiseError, NotKnown
from normwise.facts.ranks import synchronizes
from normwise.graph import Graph, trace
from normwise.rendering import both
from normwise.targets.target import Target

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Calls", "calls"]

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one norm with running statistics on the inputs of two ranks."""

    path: str
    here: int
    there: int
    synchronizes: bool


def calls(facts: Facts) -> tuple[Calls, ...]:
    """Count the calls of every module with running statistics, and the collectives of every other module.

    Raises:
        NotKnown: the inputs of another rank were not given, or the model does not run on them.
    """
    other = facts.target.inputs_other_rank
    if other is None:
        raise NotKnown(
            both(
                "needs what another rank sees: give inputs_other_rank=...",
                "需要其他 rank 的输入：inputs_other_rank=...",
            )
        )
    model = facts.target.model
    held = {p: m for p, m in model.named_modules() if getattr(m, "running_var", None) is not None}
    facts.traced  # noqa: B018 - without inputs nothing is compared
    if not held and not _collectives(facts.traced.graph):
        return ()
    facts.spend(forward=2)
    here = _counted(facts.target, held)
    args, kwargs = _as_call(other)
    there = _counted(dataclasses.replace(facts.target, args=args, kwargs=kwargs), held)
    return tuple(
        Calls(path=p, here=here[p], there=there[p], synchronizes=p not in held or synchronizes(held[p]))
        for p in dict.fromkeys([*held, *here, *there])
    )


def _counted(target: Target, held: Mapping[str, nn.Module]) -> Counter[str]:
    """Return the calls in a training forward; in eval mode where a collective would wait for other processes."""
    waits = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    try:
        graph = trace(target, evaluate=waits, mode="grad").graph
    except NormwiseError as error:
        why = str(error)
        raise NotKnown(both(f"the inputs of a rank were refused: {why}", f"某个 rank 的输入被拒绝：{why}")) from error
    return Counter(c.path for c in graph.calls if c.path in held) + _collectives(graph, held)


def _collectives(graph: Graph, held: Mapping[str, nn.Module] | None = None) -> Counter[str]:
    paths = (graph.path(op) for op in graph.ops if op.namespace in _COLLECTIVES)
    return Counter(path for path in paths if held is None or path not in held)


def _as_call(given: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(given, Mapping):
        return (), given
    return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), {}
