"""Whether one step with a cache computes what the whole sequence does at that step."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normwise.errors import NotKnown, TraceError
from normwise.facts import mixing
from normwise.facts.changed_inputs import is_mask
from normwise.facts.differences import (
    ABOVE_FLOOR,
    AGREE,
    DIFFER,
    changes,
    largest_change,
    paired_with_output,
    relative_change,
)
from normwise.facts.norms import NormCall
from normwise.facts.runs import Run
from normwise.facts.sites import Site
from normwise.graph import Instead, aligned
from normwise.rendering import both
from normwise.targets import Target, inputs, unwrap

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Decoding", "read"]

# How a model says that it decodes with a cache: the arguments and the output's fields of transformers' decoders, which
# have had several names.
_CACHES, _SWITCH = ("cache", "past_key_values", "cache_params", "state"), "use_cache"
_DECODERS = "decoder_"  # how the names begin of what the decoder of an encoder and a decoder reads
_STEPS = 4  # two for the prefill leave room for one that is decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The last step of the example inputs, in one run of all steps and as one step behind a prefill."""

    step: int
    change: float  # of the outputs at that step, relative to their root mean square
    norm_change: float = 0.0  # of the first norm's output whose own input agrees
    floor: float = 0.0  # and of its input
    sites: tuple[Site, ...] = ()  # the norms whose output differs although their input agrees
    change_held: Callable[[], float] | None = None  # with their outputs taken from the run of all steps


_NO_CACHE = both(
    "needs a cache to decode with that normwise knows (use_cache, past_key_values)",
    "需要 normwise 认识的解码缓存（use_cache、past_key_values）",
)
_NO_STEPS = both("the inputs have no one time axis of at least 4 steps", "输入没有统一的、至少 4 步的时间轴")


def read(facts: Facts) -> Decoding:
    """Prefill all steps but the last, then decode it: two runs.

    Raises:
        NotKnown: the model keeps no cache, or the two ways cannot be compared.
    """
    argument = _cache_argument(facts.target.model)
    if argument is None:
        raise NotKnown(_NO_CACHE)
    return _Probe(facts.exact, argument).compared()


def _cache_argument(model: nn.Module) -> str | None:
    forward = inspect.signature(unwrap(model)[0].forward).parameters
    return next((name for name in _CACHES if name in forward and _SWITCH in forward), None)


class _Probe:
    def __init__(self, facts: Facts, argument: str) -> None:
        self.facts, self.target, self.argument = facts, facts.target, argument
        self.decoders = self._decoders()
        self.steps = inputs.size_of(self.decoders, "time")
        if self.steps < _STEPS:
            raise NotKnown(_NO_STEPS)

    def compared(self) -> Decoding:
        """Return what differs between the two ways."""
        last = self.steps - 1
        base = self.facts.runs.base
        cache = self._prefill(last)
        args, kwargs = self._cut(slice(last, last + 1))
        kwargs = {**kwargs, _SWITCH: True}

        def decode(**more: Any) -> Run:
            return self._run(args, {**kwargs, self.argument: copy.deepcopy(cache)}, **more)

        step = decode()
        pairs = aligned(base.graph, step.graph)
        found = [(c, *moved) for c in self.facts.norm_calls.norms if (moved := self._moved(c, base, step, pairs))]
        change = self._output_change(base, step, pairs)
        if not found or change <= AGREE:
            return Decoding(step=last, change=change)
        calls = [c for c, *_ in found]

        @functools.cache
        def change_held() -> float:
            instead, wanted = self._holding(base, step, pairs)
            repaired = decode(wanted=wanted | set(step.graph.outputs), instead=instead)
            return self._output_change(base, repaired, pairs)

        if not mixing.moved(change, change_held):
            return Decoding(step=last, change=change)
        return Decoding(
            step=last,
            change=change,
            norm_change=found[0][1],
            floor=found[0][2],
            sites=mixing.sites_of_calls(self.facts.sites, calls),
            change_held=change_held,
        )

    def _holding(self, base: Run, step: Run, pairs: Mapping[int, int]) -> tuple[dict[int, Instead], set[int]]:
        """Return what holds every norm to the run of all steps where its input agrees, and the values that it reads.

        The faulty norm of one block spoils the input of the next; once it is held, that one is seen and held as well.
        """
        instead: dict[int, Instead] = {}
        wanted: set[int] = set()
        for call in self.facts.norm_calls.norms:
            ends = (call.input, paired_with_output(call, base.graph))
            ids = [pairs.get(-1 if end is None else end, -1) for end in ends]
            parts = [
                self._at_step(base.tensors[end], step.tensors[id])
                for end, id in zip(ends, ids, strict=True)
                if end is not None and end in base.tensors and id in step.tensors
            ]
            if len(parts) == len(ends) and parts[0] is not None and parts[1] is not None:
                wanted.update(ids)
                instead[ids[1]] = _held(ids[0], ids[1], parts[0], parts[1])
        return instead, wanted

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], **more: Any) -> Run:
        try:
            return self.facts.runs.variant(args, kwargs, **more)
        except TraceError as error:
            raise NotKnown(
                both(f"the model does not decode step by step: {error}", f"模型无法逐步解码：{error}")
            ) from error

    def _prefill(self, steps: int) -> Any:
        """Return the cache that all steps but the last leave."""
        held: list[Any] = []

        def watch(model: nn.Module) -> None:
            unwrap(model)[0].register_forward_hook(lambda module, args, output: held.append(output))

        args, kwargs = self._cut(slice(0, steps))
        self._run(args, {**kwargs, _SWITCH: True}, prepare=watch, wanted=())
        found = [cache for name in _CACHES if (cache := _field(held[-1], name)) is not None] if held else []
        if not found:
            raise NotKnown(_NO_CACHE)
        return found[0]

    def _cut(self, where: slice) -> inputs.Call:
        """Return the inputs of some steps; a mask reaches from the beginning up to them."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            axis = inputs.axis_of(self.decoders, "time", tensor)
            if axis is None:
                return tensor
            start = 0 if is_mask(tensor) and tensor.ndim == 2 and not self._only(tensor) else where.start
            return tensor.narrow(axis, start, where.stop - start)

        args, kwargs = inputs.map_tensors((self.decoders.args, dict(self.decoders.kwargs)), cut)
        return args or self.target.args, {**self.target.kwargs, **kwargs}

    def _decoders(self) -> Target:
        """Return the target with the inputs that are decoded alone: the decoder's, where an encoder has its own."""
        own = {k: v for k, v in self.target.kwargs.items() if k.startswith(_DECODERS)}
        return dataclasses.replace(self.target, args=(), kwargs=own) if own else self.target

    def _only(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of zeros and ones is what the model reads: nothing else has its steps."""
        return not any(
            t is not tensor and inputs.axis_of(self.decoders, "time", t) is not None
            for t in inputs.tensors_of(self.decoders)
        )

    def _at_step(self, whole: torch.Tensor, step: torch.Tensor) -> torch.Tensor | None:
        """Return the last step of a value of the run of all steps, in the shape of the decoded one."""
        if whole.shape == step.shape:
            return None
        if whole.ndim == step.ndim:
            grown = [a for a in range(whole.ndim) if whole.shape[a] != step.shape[a]]
            if len(grown) == 1 and whole.shape[grown[0]] == self.steps and step.shape[grown[0]] == 1:
                return whole.narrow(grown[0], self.steps - 1, 1)
            if grown == [0] and whole.shape[0] == step.shape[0] * self.steps:  # steps merged with the batch
                return whole.unflatten(0, (-1, self.steps))[:, -1]
        return None

    def _moved(self, call: NormCall, base: Run, step: Run, pairs: Mapping[int, int]) -> tuple[float, float] | None:
        """Return how far a norm's output differs at the step although its input agrees, and how well that agrees."""
        value = paired_with_output(call, base.graph)
        parts = []
        for each in (call.input, value):
            whole, one = base.tensors.get(each if each is not None else -1), step.tensors.get(pairs.get(each or -1, -1))
            at_step = None if whole is None or one is None else self._at_step(whole, one)
            if at_step is None or one is None:
                return None
            parts.append((at_step, one))
        floor, change = _of_rows(*parts[0], centred=call.spec is None or call.spec.center), largest_change(*parts[1])
        return (change, floor) if floor <= AGREE and change >= max(DIFFER, ABOVE_FLOOR * floor) else None

    def _output_change(self, base: Run, step: Run, pairs: Mapping[int, int]) -> float:
        moved = [0.0]
        ends = step.graph.outputs
        # ops of the cache alone may stand before the last one: then the place among the outputs tells
        for value, there in zip_longest(base.graph.outputs, ends[: len(base.graph.outputs)], fillvalue=-1):
            paired = pairs.get(value, -1)
            whole, one = base.tensors.get(value), step.tensors.get(paired if paired in ends else there)
            part = None if whole is None or one is None else self._at_step(whole, one)
            if part is not None and one is not None:
                moved.append(relative_change(part, one))
        return max(moved)


def _of_rows(whole: torch.Tensor, one: torch.Tensor, *, centred: bool) -> float:
    """Return the largest difference relative to what a norm divides its own row by: rounding counts against that."""
    rows = whole.detach().double()
    rows = rows - rows.mean(-1, keepdim=True) if centred else rows
    sizes = rows.square().mean(-1).sqrt().cpu()
    apart = changes(whole, one).double().amax(-1)
    return float(torch.where(apart == 0, 0.0, apart / sizes).max())


def _held(read: int, made: int, x: torch.Tensor, y: torch.Tensor) -> Instead:
    """Return what a norm makes of its input: ``y`` where that is ``x``, else what it makes."""
    return lambda kept: y if largest_change(x, kept[read]) <= AGREE else kept[made]


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
