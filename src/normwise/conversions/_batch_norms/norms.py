"""The batch norms of a model that ``fold-batch-norm`` may remove: found in the dataflow, proved to be s x + t."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from normwise.conversions._arithmetic import holds_numbers
from normwise.conversions._batch_norms.arithmetic import affine_of
from normwise.conversions._batch_norms.paths import Paths
from normwise.conversions._plan import Blocked, Refusal
from normwise.errors import ConversionRefused, NotKnown
from normwise.facts.calls import NormCall, agree, random_input
from normwise.facts.flow import through_casts
from normwise.graph import Call
from normwise.spec import Scope

__all__ = ["BatchNorm", "find", "held"]

_EVAL = "call .eval() on the model first"
_OWN_MODULE = "put the norm in a module of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNorm:
    """A batch norm that is a module of its own, called once: y = s x + t along one axis.

    Args:
        path: of the module.
        norm: its execution.
        input: the value that the module is given.
        output: the value behind the norm, before an activation that the module applies.
        axis: of the channels, from the front.
        members: ids of the ops of the module, those of the activation apart.
        reads: keys of variance, mean, weight and bias, those that it has.
        has: which of mean, weight and bias it has.
        keep: the child that applies the activation.
        drops: its state-dict keys, below the module.
    """

    path: str
    norm: NormCall
    input: int
    output: int
    axis: int
    members: frozenset[int]
    reads: tuple[str, ...]
    has: tuple[str, ...]
    keep: str
    drops: tuple[str, ...]

    def numbers(self, index: list[int] | None) -> Mapping[str, Any]:
        """Return the norm as the functions of recipes take it."""
        spec = self.norm.spec
        assert spec is not None
        return {"eps": spec.eps, "offset": spec.weight_offset, "has": self.has, "index": index}


def find(paths: Paths) -> tuple[list[BatchNorm], list[Refusal]]:
    """Return the batch norms in the order in which they run, and the reasons of those that cannot be read."""
    calls = [n for n in paths.facts.norm_calls.norms if n.spec is not None and n.spec.scope is Scope.BATCH]
    runs = Counter(paths.graph.calls[n.call].path for n in calls)
    found: list[BatchNorm] = []
    refused: dict[str, Refusal] = {}
    for norm in calls:
        path = paths.graph.calls[norm.call].path
        try:
            found.append(_read(paths, norm, path, runs[path]))
        except Blocked as blocked:
            refused.setdefault(path, blocked.refusal(path))
    used = {name for n in calls if n.running_var is not None for name in paths.graph.values[n.running_var].names}
    ran = {call.path for call in paths.graph.calls}
    for kept in paths.facts.running:
        if kept.path not in ran and f"{kept.path}.running_var" not in used:
            refused[kept.path] = Refusal(
                path=kept.path,
                why="it holds running statistics, but did not run on the example inputs",
                unblock="give inputs that reach it",
            )
    return found, list(refused.values())


def _read(paths: Paths, norm: NormCall, path: str, runs: int) -> BatchNorm:
    facts, graph = paths.facts, paths.graph
    module = facts.modules.get(path)
    if module is None or not path:
        raise Blocked("its arithmetic stands in the forward of the model itself", norm.op, _OWN_MODULE)
    if module.training:
        raise Blocked("it is in training mode, where it normalizes with the batch", norm.op, _EVAL)
    if norm.uses_batch or norm.running_var is None:
        raise Blocked(
            "it normalizes with the batch in eval mode, too, not with running statistics",
            norm.op,
            "train it with track_running_stats=True",
        )
    if runs > 1:
        raise Blocked(f"its module runs {runs} times", norm.op, "give each place a norm of its own")
    if sum(each is module for each in facts.modules.values()) > 1:
        raise Blocked("its module is registered under several paths", norm.op, "register it once")
    call = graph.calls[norm.call]
    inner = _below(paths, call)
    weight, bias = norm.weight, norm.bias
    if norm.native:  # a factor behind it, which the map of norms counts as its gain, is no part of the module
        output, given = norm.core, {i for i in norm.op.inputs if i != norm.input}
        weight, bias = (v if v in given else None for v in (weight, bias))
    else:
        output = norm.output
    source, output, keep = _interface(paths, norm, call, output)
    kept = {c.id for c in inner if keep and c.path == f"{path}.{keep}"}
    members = frozenset(o.id for o in graph.ops if o.call in {c.id for c in inner} - kept)
    named = {"mean": norm.running_mean, "weight": weight, "bias": bias}
    vectors = {name: value for name, value in named.items() if value is not None}
    for name, value in {"variance": norm.running_var, **vectors}.items():
        record = graph.values[value]
        if not record.names:
            raise Blocked(f"its {name} is computed, not held", graph.producer(value), "fold before that is done")
        if len(record.names) > 1:
            raise Blocked(f"its {name} is shared: {', '.join(record.names)}", norm.op, "give the norm one of its own")
        outside = next((o for o in graph.consumers(value) if o.id not in members), None)
        if outside is not None:
            raise Blocked(f"its {name} is also read outside it", outside, "give the other reader a copy")
    if keep and next(iter(module.get_submodule(keep).state_dict()), None) is not None:
        raise Blocked("its activation has parameters", norm.op, "put the activation in a module beside the norm")
    spec, ndim = norm.spec, len(graph.values[norm.input].shape)
    assert spec is not None
    channels = [axis for axis in range(ndim) if axis - ndim not in spec.axes]
    read = BatchNorm(
        path=path,
        norm=norm,
        input=source,
        output=output,
        axis=channels[0],
        members=members,
        reads=tuple(graph.values[v].names[0] for v in (norm.running_var, *vectors.values())),
        has=tuple(vectors),
        keep=keep,
        drops=tuple(module.state_dict()),
    )
    if len(channels) != 1 or spec.eps is None or not _is_affine(paths, read, (norm.running_var, *vectors.values())):
        raise Blocked("what it computes is not understood", norm.op, "report it with the module's code")
    held(paths, read)  # raises where its numbers are no norm's
    return read


def _below(paths: Paths, call: Call) -> list[Call]:
    """Return a call and those inside it, which follow it."""
    return [call, *takewhile(lambda c: c.parent >= call.id, paths.graph.calls[call.id + 1 :])]


def _interface(paths: Paths, norm: NormCall, call: Call, output: int) -> tuple[int, int, str]:
    """Return what the module is given, the value behind the norm, and the child that makes the module's output of it.

    Raises:
        Blocked: the module does something else, too.
    """
    graph, flow = paths.graph, paths.facts.flow
    inputs, outputs = list(call.inputs), list(call.outputs)
    if len(inputs) > 1:
        raise Blocked(f"{call.path} is given {len(inputs)} tensors", norm.op, "give the norm its input alone")
    if len(inputs) == len(outputs) == 1:
        given, returned = inputs[0], outputs[0]
        alike = graph.values[given].dtype == graph.values[returned].dtype
        if alike and through_casts(flow, norm.input) == through_casts(flow, given):
            if through_casts(flow, returned) == output:
                return given, returned, ""
            for child in graph.calls:
                if child.parent == call.id and child.outputs == call.outputs and child.inputs == (output,):
                    return given, output, child.path.removeprefix(f"{call.path}.")
    other = next(
        (o for o in graph.ops if o.call == call.id and o.id > norm.op.id and o.id not in norm.members), norm.op
    )
    raise Blocked(f"{call.path} computes more than the norm: {other.short}", other, _OWN_MODULE)


def _is_affine(paths: Paths, read: BatchNorm, vectors: tuple[int, ...]) -> bool:
    """Run the module's own ops on random data in float64, and compare with s x + t."""
    graph = paths.graph
    shape = graph.values[read.input].shape
    size = shape[read.axis]
    if any(graph.values[v].numel != size for v in vectors):
        return False
    given = {v: random_input(graph.values[v].shape, None, offset=i).abs() for i, v in enumerate(vectors, start=1)}
    scale, shift = affine_of(list(given.values()), [read.numbers(None)])
    wide = [size if axis == read.axis else 1 for axis in range(len(shape))]
    small = tuple(s if axis == read.axis else min(s, 3) for axis, s in enumerate(shape))
    for each in dict.fromkeys((small, shape)):  # a view with sizes of its own takes only the recorded shape
        x = random_input(each, None)
        try:
            return agree(paths.replay(read.output, given | {read.input: x}), x * scale.view(wide) + shift.view(wide))
        except NotKnown:
            continue
    return False


def held(paths: Paths, norm: BatchNorm) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return s and t of a norm, or None where the model has no numbers.

    Raises:
        Blocked: a variance with eps is not positive, or a number is not finite.
    """
    tensors = [paths.facts.tensors[key] for key in norm.reads]
    if not all(map(holds_numbers, tensors)):
        return None
    try:
        scale, shift = affine_of([t.detach().double().cpu() for t in tensors], [norm.numbers(None)])
    except ConversionRefused as error:
        raise Blocked(error.reasons[0], norm.norm.op, "repair its running statistics") from None
    if not bool(torch.isfinite(scale).all() and torch.isfinite(shift).all()):
        raise Blocked("its numbers are not all finite", norm.norm.op, "repair its running statistics")
    return scale, shift
