"""What the processes of a distributed run hold: how many there are, and whether their norms agree.

Nothing here is a collective: each process leaves a short description of its tensors in torch's own key-value store
and waits a moment for the others, so that a check on one rank alone ends with "not checked" and never hangs. Without a
process group, the state dicts of the ranks can be compared from files: ``config={"rank_states": [...]}``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from normwise.errors import NotKnown
from normwise.facts.conventions import setting
from normwise.rendering import both
from normwise.targets.target import Target

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Ranks", "Sketch", "synchronizes", "world_size"]

PATIENCE = 5.0  # seconds to wait for the other ranks
# keys under which configurations and launchers keep the number of processes
_WORLD = ("world_size", "num_processes", "n_gpus", "num_gpus", "data_parallel_size", "dp_size", "num_replicas")
_STATES, _GRADIENTS = "rank_states", "rank_gradients"
_PROJECTIONS = 16  # the estimate of a relative difference is right within a factor of 2
_SEED = 20261129

NEEDS = both(
    "needs several ranks: check on every rank after init_process_group, or give config={'rank_states': [...]}",
    "需要多个 rank：在 init_process_group 之后于每个 rank 上检查，或给出 config={'rank_states': [...]}",
)
_NEEDS_GRADIENTS = both(
    "needs the gradients of several ranks: check on every rank after backward, or give config={'rank_gradients': ...}",
    "需要多个 rank 的梯度：在反向传播后于每个 rank 上检查，或给出 config={'rank_gradients': ...}",
)
_ALONE = both(
    f"the other ranks did not take part within {PATIENCE:g} s: run the check on every rank",
    f"其他 rank 在 {PATIENCE:g} 秒内没有参与：请在每个 rank 上运行检查",
)


@dataclass(frozen=True, slots=True)
class Sketch:
    """A tensor in a few numbers: enough to tell whether two are the same, and how far apart they are."""

    digest: str
    size: float  # its norm
    projections: tuple[float, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Sketch:
        """Describe a tensor."""
        plain = tensor.detach().cpu().contiguous()
        bits = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        digest = hashlib.sha256(str((tuple(plain.shape), plain.dtype)).encode() + bits).hexdigest()[:16]
        flat = plain.reshape(-1).double().nan_to_num()
        random = torch.Generator().manual_seed(_SEED + flat.numel())
        signs = torch.randint(0, 2, (_PROJECTIONS, flat.numel()), generator=random, dtype=torch.int8) * 2 - 1
        return cls(digest, float(flat.norm()), tuple((signs.double() @ flat).tolist()))

    def apart(self, other: Sketch) -> float:
        """Return the relative distance between two tensors, estimated from random projections."""
        if self.digest == other.digest:
            return 0.0
        gaps = [(a - b) ** 2 for a, b in zip(self.projections, other.projections, strict=True)]
        return math.sqrt(sum(gaps) / len(gaps)) / max(self.size, other.size, 1e-30)


States = tuple[Mapping[str, Sketch], ...]


class Ranks:
    """The parameters, buffers and gradients of all ranks, described once and compared by the rules."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._known: dict[str, States | NotKnown] = {}

    @property
    def states(self) -> States:
        """Vectors of parameters and buffers by name, one mapping a rank.

        Raises:
            NotKnown: there is one process, or the others do not take part.
        """
        return self._once(_STATES, lambda: _held(self.facts.target.model), NEEDS)

    @property
    def gradients(self) -> States:
        """The gradients that the parameters hold, one mapping a rank.

        Raises:
            NotKnown: as for ``states``, or there are none.
        """
        return self._once(_GRADIENTS, lambda: _gradients(self.facts.target.model), _NEEDS_GRADIENTS)

    def norm_names(self) -> tuple[str, ...]:
        """Return the names of the gains and shifts that norms use."""
        rows = self.facts.norms
        return tuple(dict.fromkeys(n for r in rows for n in (r.weight_path, r.bias_path) if n))

    def _once(self, key: str, mine: Any, needs: str) -> States:
        if key not in self._known:
            try:
                self._known[key] = self._gather(key, mine, needs)
            except NotKnown as why:
                self._known[key] = why
        known = self._known[key]
        if isinstance(known, NotKnown):
            raise known
        return known

    def _gather(self, key: str, mine: Any, needs: str) -> States:
        given = setting(self.facts.target.config, key, nested=True)
        if given is not None:
            return _given(given)
        if not _several():
            raise NotKnown(needs)
        tensors = mine()
        if not tensors:
            raise NotKnown(needs)
        return _exchanged(key, {name: Sketch.of(t) for name, t in tensors.items()})


def apart(states: States, name: str) -> float | None:
    """Return the largest relative distance between two ranks' tensors of a name; None where a rank lacks it."""
    held = [state.get(name) for state in states]
    known = [sketch for sketch in held if sketch is not None]
    if len(known) < len(held) or len(known) < 2:
        return None
    return max(a.apart(b) for a, b in itertools.combinations(known, 2))


def world_size(target: Target) -> int | None:
    """Return the number of processes, from torch, from a configuration or from evidence of another rank."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    for name in _WORLD:
        number = setting(target.config, name, nested=True)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return number
    states = setting(target.config, _STATES, nested=True)
    if isinstance(states, Sequence) and len(states) > 1:
        return len(states)
    return 2 if target.inputs_other_rank is not None else None


def synchronizes(module: nn.Module) -> bool:
    """Whether a norm shares its statistics between processes: it holds a process group beside its buffers."""
    return hasattr(module, "process_group") and getattr(module, "running_var", None) is not None


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _given(states: Any) -> States:
    if not isinstance(states, Sequence) or len(states) < 2 or not all(isinstance(s, Mapping) for s in states):
        raise NotKnown(both("the states of the ranks are not a list of dicts", "各 rank 的状态不是由字典组成的列表"))
    return tuple({str(n): Sketch.of(t) for n, t in s.items() if _described(t)} for s in states)


def _described(tensor: Any) -> bool:
    """Whether a tensor is whole (no shard) and holds numbers."""
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.device.type != "meta" and tensor.layout is torch.strided and not tensor.is_quantized


def _held(model: nn.Module) -> dict[str, Tensor]:
    return {n: t for n, t in itertools.chain(model.named_parameters(), model.named_buffers()) if _described(t)}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None and _described(p.grad)}


_rounds = itertools.count()


def _exchanged(key: str, mine: Mapping[str, Sketch]) -> States:
    """Leave a description in the store that the processes share, and read those of the others."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    names = hashlib.sha256("\0".join(sorted(mine)).encode(errors="backslashreplace")).hexdigest()[:12]
    where = f"normwise/{key}/{names}/{next(_rounds)}"
    store.set(f"{where}/{rank}", json.dumps({n: [s.digest, s.size, *s.projections] for n, s in mine.items()}))
    others = [f"{where}/{r}" for r in range(world)]
    try:
        store.wait(others, timedelta(seconds=PATIENCE))
    except Exception as error:  # each backend has its own
        store.delete_key(f"{where}/{rank}")  # a later check must not read it
        raise NotKnown(_ALONE) from error
    read = [json.loads(store.get(name)) for name in others]
    return tuple({n: Sketch(d, size, tuple(p)) for n, (d, size, *p) in state.items()} for state in read)
