"""The norms of a model against the checkpoint it was loaded from.

Live weights decide: a tensor whose numbers are those of some tensor of the checkpoint was loaded, whatever it is
called there and even if the loader added 1 on the way. Only what is still at its initial value can be lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normwise.errors import NotKnown
from normwise.facts import unexecuted
from normwise.facts.state_dicts import (
    LoadInfo,
    Prefix,
    best_prefix,
    load_info,
    pattern,
    renamed,
    same,
    tensors_of,
)
from normwise.graph import Graph
from normwise.rendering import both
from normwise.targets.checkpoint.keys import names_a_norm, role
from normwise.targets.target import numberless

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Checkpoints", "Dropped", "NormTensor", "Role", "State", "norm_tensors"]

Tensors = Mapping[str, torch.Tensor]


class Role(StrEnum):
    """What a tensor of a norm is."""

    GAIN = "gain"
    SHIFT = "shift"
    MEAN = "running mean"
    VARIANCE = "running variance"


class State(StrEnum):
    """How a live tensor stands to the checkpoint."""

    EQUAL = "equal"
    SHIFTED = "shifted"  # by the 1 of a unit offset
    DIFFERENT = "different"  # the checkpoint has it, with other numbers
    ABSENT = "absent"


@dataclass(slots=True, kw_only=True)
class NormTensor:
    """A parameter or a running statistic of a norm."""

    key: str
    path: str
    role: Role
    live: torch.Tensor
    neutral: float  # its initial value
    centred: bool = True  # its norm takes the mean out, as far as is known
    state: State = State.ABSENT
    source: str | None = None  # the checkpoint's key
    proposed: str | None = None  # a key of the checkpoint that is likely another name of it

    @property
    def initial(self) -> bool:
        """Whether every element is what a fresh norm starts with."""
        return bool((self.live == self.neutral).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A norm of the checkpoint that the model does not hold."""

    path: str  # in the checkpoint
    keys: tuple[str, ...]
    within: str  # the part of the checkpoint it belongs to
    alone: bool  # everything else of that part is in the model


@dataclass
class Checkpoints:
    """The comparison; see ``read`` for what raises."""

    norms: tuple[NormTensor, ...]
    live: Tensors
    tensors: Tensors  # of the checkpoint; empty where only a load report was given
    info: LoadInfo | None
    prefix: Prefix = field(default_factory=Prefix)

    @classmethod
    def read(cls, facts: Facts) -> Checkpoints:
        """Compare.

        Raises:
            NotKnown: neither a checkpoint nor a load report was given, or it is of another model.
        """
        info = load_info(facts.target.load_info)
        if facts.target.checkpoint is None and info is None:
            raise NotKnown(both("needs the checkpoint: pass checkpoint=...", "需要检查点：传入 checkpoint=..."))
        tensors = {} if facts.target.checkpoint is None else tensors_of(facts.target.checkpoint)
        live = _live(facts.target.model)
        made = cls(tuple(norm_tensors(facts)), live, tensors, info, best_prefix(tensors, live))
        made._compare()
        return made

    def _compare(self) -> None:
        weights = any(self.live[k].is_floating_point() for k in self.matched)  # counters match in any model
        if self.tensors and not weights:
            named = any(self._named(k) for k in self.live)
            raise NotKnown(_OTHER_SHAPES if named else _OTHER_MODEL)
        for norm in self.norms:
            self._judge(norm)
        free = self._unclaimed
        for norm in self.norms:
            if norm.state is State.ABSENT and norm.initial:
                fits = [k for k in free if k not in self.tensors or self.tensors[k].numel() == norm.live.numel()]
                norm.proposed = renamed(norm.key, fits)

    def _named(self, key: str) -> str | None:
        """Return the checkpoint's key of a live tensor, by name."""
        return self._by_name.get(key)

    @cached_property
    def _by_name(self) -> dict[str, str]:
        return {ours: k for k in self.tensors if (ours := self.prefix.to_model(k)) is not None}

    @cached_property
    def _by_size(self) -> dict[int, list[str]]:
        sizes: dict[int, list[str]] = defaultdict(list)
        for key, tensor in self.tensors.items():
            sizes[tensor.numel()].append(key)
        return sizes

    def _judge(self, norm: NormTensor) -> None:
        named = self._named(norm.key)
        for key in [named] if named else []:
            norm.source, norm.state = key, self._state(norm.live, key)
        if norm.state in (State.EQUAL, State.SHIFTED) or norm.initial:
            return  # many norms share their initial value: only a name says which of them it is
        for key in self._by_size.get(norm.live.numel(), ()):
            state = self._state(norm.live, key)
            if state in (State.EQUAL, State.SHIFTED):
                norm.source, norm.state = key, state
                return

    def _state(self, live: torch.Tensor, key: str) -> State:
        there = self.tensors[key]
        if same(live, there):
            return State.EQUAL
        if same(live, there, shift=1.0) or same(live, there, shift=-1.0):
            return State.SHIFTED
        return State.DIFFERENT

    # -- what else was loaded ------------------------------------------------------------

    @cached_property
    def others(self) -> dict[str, torch.Tensor]:
        """The floating tensors of the model that are no norm's."""
        norms = {n.key for n in self.norms}
        return {k: t for k, t in self.live.items() if k not in norms and t.is_floating_point() and t.numel() > 1}

    @cached_property
    def matched(self) -> dict[str, str]:
        """The model's tensors that the checkpoint has, by name and shape or by value, with its keys."""
        found = {}
        for key, tensor in self.live.items():
            named = self._named(key)
            if named is not None and self.tensors[named].numel() == tensor.numel():
                found[key] = named
            elif tensor.dim() > 1 and (twin := self._twin(tensor)) is not None:
                found[key] = twin
        return found

    def _twin(self, tensor: torch.Tensor) -> str | None:
        return next((k for k in self._by_size.get(tensor.numel(), ()) if same(tensor, self.tensors[k])), None)

    @cached_property
    def covered(self) -> float:
        """The share of the elements outside norms that came with the checkpoint: small for adapters."""
        total = sum(t.numel() for t in self.others.values())
        if not self.tensors:
            assert self.info is not None
            held = sum(t.numel() for k, t in self.others.items() if not _listed(k, self.info.missing))
        else:
            held = sum(t.numel() for k, t in self.others.items() if k in self.matched)
        return held / total if total else 1.0

    @cached_property
    def untouched(self) -> float:
        """The share of the loaded tensors outside norms that still hold the checkpoint's numbers.

        Training, merging and folding change them; then a gain that differs says nothing about the loading.
        """
        if not self.tensors:
            return 1.0
        loaded = [(t, self.tensors[self.matched[k]]) for k, t in self.others.items() if k in self.matched]
        return sum(same(a, b) for a, b in loaded) / len(loaded) if loaded else 1.0

    @cached_property
    def nothing_loaded(self) -> bool:
        """Whether no tensor of the model is the checkpoint's, because all names there begin otherwise.

        Every gain and shift is then where a fresh norm starts, which no training since would have left there.
        """
        if not self.tensors or self.untouched > 0 or self.prefix == Prefix():
            return False
        held = [n for n in self.norms if n.state is not State.ABSENT]
        return bool(held) and all(n.initial for n in held) and any(n.state is State.DIFFERENT for n in held)

    # -- what the model has no place for ---------------------------------------------------

    @cached_property
    def _unclaimed(self) -> tuple[str, ...]:
        if not self.tensors:
            return tuple(sorted(self.info.unexpected)) if self.info else ()
        claimed = {n.source for n in self.norms if n.source} | set(self.matched.values())
        return tuple(k for k in self.tensors if k not in claimed)

    @cached_property
    def dropped(self) -> tuple[Dropped, ...]:
        """The norms of the checkpoint of which nothing is in the model, under whatever name."""
        proposed = {n.proposed for n in self.norms}
        free = [k for k in self._unclaimed if k not in proposed and not self._lives(k)]
        leaves: dict[str, list[str]] = defaultdict(list)
        for key in self.tensors or free:
            leaves[key.rpartition(".")[0]].append(key)
        spare = set(free)
        lost = [(path, keys) for path, keys in leaves.items() if spare.issuperset(keys) and self._norm_like(path, keys)]
        gone = {k for k in free if not any(k in keys for _, keys in lost)}
        return tuple(self._dropped(path, keys, gone) for path, keys in lost)

    def _dropped(self, path: str, keys: list[str], gone: Iterable[str]) -> Dropped:
        within = path.rpartition(".")[0]
        alone = not any(k.startswith(f"{within}." if within else "") for k in gone)
        return Dropped(path=path, keys=tuple(keys), within=within, alone=alone)

    def _lives(self, key: str) -> bool:
        """Whether the model holds a tensor's numbers under another name (or plus 1); shared constants say nothing."""
        there = self.tensors.get(key)
        if there is None or there.numel() == 0 or bool((there == there.reshape(-1)[0]).all()):
            return False
        alike = [t for t in self.live.values() if t.numel() == there.numel()]
        return any(same(t, there, shift=s) for t in alike for s in (0.0, 1.0, -1.0))

    def _norm_like(self, path: str, keys: list[str]) -> bool:
        """Whether a module of the checkpoint is a norm: only vectors of one length, and a pair or its name says so.

        A gain alone may be a layer scale or a PReLU; with a shift of its length it is a norm.
        """
        tensors = [self.tensors[k] for k in keys if k in self.tensors]
        vectors = [t for t in tensors if t.dim() > 0]
        if any(sum(s > 1 for s in t.shape) > 1 or not t.is_floating_point() for t in vectors):
            return False
        if len({t.numel() for t in vectors}) > 1:
            return False
        roles = {role(k) for k in keys}
        return "weight" in roles and ("bias" in roles or names_a_norm(path.rpartition(".")[2]))

    def shift_without_home(self, norm: NormTensor) -> str | None:
        """Return the key of a shift that the checkpoint has beside a loaded gain, and the model's norm has not."""
        if norm.role is not Role.GAIN or norm.source is None:
            return None
        stem = norm.source.rpartition(".")[0]
        keys = (f"{stem}.{name}" for name in ("bias", "beta", "b", "offset", "shift"))
        return next((k for k in keys if k in self._unclaimed and not self._lives(k)), None)

    @property
    def lost(self) -> tuple[NormTensor, ...]:
        """Tensors still at their initial value although the checkpoint has, or may have, other numbers for them."""
        return tuple(n for n in self.norms if n.initial and self._has_other_numbers(n))

    def _has_other_numbers(self, norm: NormTensor) -> bool:
        if norm.state is State.ABSENT:
            key = norm.proposed
            if self.info is not None and norm.key not in self.matched and not _listed(norm.key, self.info.missing):
                return False  # the loader knew where to find it
            return key is None or key not in self.tensors or not same(norm.live, self.tensors[key])
        return norm.state is State.DIFFERENT

    @property
    def key_map(self) -> dict[str, str]:
        """The renaming that would load what was lost: patterns of the checkpoint's keys to those of the model."""
        if self.nothing_loaded:
            return {f"{self.prefix.checkpoint}*": f"{self.prefix.model}*"}
        return {pattern(n.proposed): pattern(n.key) for n in self.lost if n.proposed}


_OTHER_SHAPES = both("the checkpoint's tensors have other shapes than the model's", "检查点的张量形状与模型不同")
_OTHER_MODEL = both("the checkpoint shares no tensor with the model", "检查点与模型没有共同的张量")


def _listed(key: str, keys: Iterable[str]) -> bool:
    """Whether a report names a tensor, perhaps without or with a prefix."""
    keys = frozenset(keys)
    return key in keys or any(k.endswith(f".{key}") or key.endswith(f".{k}") for k in keys)


def _live(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    held = {k: t.detach() for k, t in named if not nn.parameter.is_lazy(t)}
    if any(map(numberless, held.values())):
        raise NotKnown(both("the model holds no numbers", "模型没有数值"))
    return held


def norm_tensors(facts: Facts) -> Iterator[NormTensor]:
    """Yield the tensors of every norm: those that ran, by the graph, and those registered only."""
    live, seen = _live(facts.target.model), set[str]()
    for made in (*_executed(facts, live), *_registered(facts, live)):
        if made.key not in seen:
            seen.add(made.key)
            yield made


def _executed(facts: Facts, live: Tensors) -> Iterator[NormTensor]:
    try:
        sites = facts.sites
    except NotKnown:
        return
    for site in sites:
        call, spec = site.calls[0], site.row.spec
        offset, centred = (spec.weight_offset, spec.center) if spec else (0.0, True)
        roles: dict[int | None, tuple[Role, float]] = {
            call.weight: (Role.GAIN, 1.0 - offset),
            call.bias: (Role.SHIFT, 0.0),
            call.running_mean: (Role.MEAN, 0.0),
            call.running_var: (Role.VARIANCE, 1.0),
        }
        for value, (said, neutral) in roles.items():
            for key in facts.graph.values[value].names[:1] if value is not None else ():
                if key in live:
                    yield NormTensor(
                        key=key, path=site.row.path, role=said, live=live[key], neutral=neutral, centred=centred
                    )


_NAMES = {"running_mean": (Role.MEAN, 0.0), "running_var": (Role.VARIANCE, 1.0), "bias": (Role.SHIFT, 0.0)}


def _registered(facts: Facts, live: Tensors) -> Iterator[NormTensor]:
    """Yield those of norms that the run never called, or of all where there is no run."""
    model: Any = facts.target.model
    try:
        idle = facts.not_executed
    except NotKnown:
        idle = unexecuted.find(Graph(), model)
    for path in idle:
        module = model.get_submodule(path)
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            key, (role, neutral) = f"{path}.{name}", _NAMES.get(name, (Role.GAIN, 1.0))
            if name != "num_batches_tracked" and key in live:
                yield NormTensor(key=key, path=path, role=role, live=live[key], neutral=neutral)
