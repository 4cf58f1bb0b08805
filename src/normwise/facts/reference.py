"""A model beside one that is known to be right: the same inputs, and the first value at which they part.

Values are found again by their numbers and not by their names, so that a port may be written otherwise. A value of
the model is lost where no value of the reference has its numbers, and nothing computed from it is found again either:
what is fused or split differently comes back, what went wrong does not.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from normwise.errors import NormwiseError, NotKnown
from normwise.facts import needs
from normwise.facts.calls import NormCall
from normwise.facts.outcomes import MATTERS, apart, outputs_of
from normwise.facts.runs import Run
from normwise.facts.state_dicts import same
from normwise.graph import Graph, Op, ValueKind
from normwise.rendering import both
from normwise.targets.inputs import map_tensors
from normwise.targets.target import InputsFrom, Target

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["Pair", "Reference", "parameters_of"]

_PROBES = 8  # projections of a value: their mean square estimates a squared distance within a factor of a few
_ELEMENTS = 65536  # of a value, evenly spread, that are projected
_SEED = 20261129
_FEWEST = 4  # fewer elements agree by chance
_AGREE = 1e-5  # relative: rounding of float32 moves a row-wise model by 6e-7 at most (facts.differences)
_HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A norm of the model and the norm of the reference in its place."""

    mine: NormCall
    theirs: NormCall


class Reference:
    """The reference, run on the model's inputs."""

    def __init__(self, facts: Facts) -> None:
        self.mine = facts
        self.facts = _examined(facts)

    @cached_property
    def runs(self) -> tuple[Run, Run]:
        """The runs to compare, the model's first: in float32 where one of the two is in half precision."""
        first = self.mine.runs.base, self.facts.runs.base
        dtypes = {t.dtype for run in first for t in outputs_of(run)}
        if not dtypes.intersection(_HALF) or apart(*map(outputs_of, first)) <= MATTERS:
            return first
        self.mine.spend()
        return self.mine.runs.float32, self.facts.runs.float32

    @cached_property
    def distance(self) -> float:
        """The relative distance of the outputs.

        Raises:
            NotKnown: they cannot be compared.
        """
        return apart(*map(outputs_of, self.runs))

    @cached_property
    def floor(self) -> float:
        """The distance that other kernels and another dtype alone make.

        Weights rounded to half precision are other weights: where one model holds such and the other does not, the
        latter is run in that dtype, and three times what that changes is the floor.
        """
        dtypes = [_dtype_of(facts.target.model) for facts in (self.mine, self.facts)]
        half = next((d for d in dtypes if d in _HALF), None)
        if half is None or dtypes[0] == dtypes[1]:
            return MATTERS
        full = self.facts if dtypes[0] == half else self.mine
        self.mine.spend()
        return max(MATTERS, 3 * apart(outputs_of(full.runs.in_dtype(half)), outputs_of(full.runs.base)))

    @property
    def differs(self) -> bool:
        """Whether the outputs differ by more than another order of the same operations makes them."""
        return self.distance > MATTERS and self.distance > self.floor

    @property
    def differs_slightly(self) -> bool:
        """Whether the outputs differ by less than that, but by more than rounding, which half precision hides."""
        half = {t.dtype for run in self.runs for t in outputs_of(run)}.intersection(_HALF)
        return not half and self.floor == MATTERS and _AGREE < self.distance <= MATTERS

    # -- norms side by side ---------------------------------------------------------------

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """Norms of both models that stand in the same place: of one module, else of one order among as many."""
        mine, theirs = self.mine.norm_calls.norms, self.facts.norm_calls.norms
        by_path: dict[tuple[str, int], NormCall] = {self._place(self.facts.graph, n): n for n in theirs}
        found = [(n, by_path.get(self._place(self.mine.graph, n))) for n in mine]
        if len(mine) == len(theirs) and any(other is None for _, other in found):
            found = list(zip(mine, theirs, strict=True))
        return tuple(Pair(mine=n, theirs=other) for n, other in found if other is not None)

    @staticmethod
    def _place(graph: Graph, norm: NormCall) -> tuple[str, int]:
        return graph.calls[norm.call].path, graph.calls[norm.call].ordinal

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Paths of the reference's norms that have no counterpart in the model."""
        paired = {p.theirs.op.id for p in self.pairs}
        return tuple(self.facts.graph.calls[n.call].path for n in self.facts.norm_calls.norms if n.op.id not in paired)

    @cached_property
    def same_weights(self) -> float:
        """The share of the model's matrices that are the reference's of the same name; 0 without any such name.

        A port holds them unchanged, a conversion folds norms into them.
        """
        theirs = self.facts.parameters
        mine = self.mine.target.model.named_parameters(remove_duplicate=False)
        shared = [(p, theirs[n]) for n, p in mine if p.dim() > 1 and n in theirs]
        return sum(same(a, b) for a, b in shared) / len(shared) if shared else 0.0

    # -- values found again ----------------------------------------------------------------

    def first(self, *, loosely: bool = False) -> int | None:
        """Return the model's first lost value.

        Args:
            loosely: numbers that a conversion takes out of a norm do not count: its gain and shift, and the mean of
                what it reads.
        """
        run = self.runs[0]
        known = _Index(self._theirs(loosely), self.floor)
        depends = run.recording.data
        comes_back: dict[int, bool] = {}
        for op in reversed(run.graph.ops):
            later = any(comes_back.get(o, False) for use in op.outputs for o in self._readers(run.graph, use))
            for out in op.outputs:
                comes_back[out] = later or (out in run.tensors and self._again(known, run, out, loosely))
        lost = (o for op in run.graph.ops for o in op.outputs if depends[o] and o in run.tensors)
        return next((v for v in lost if not comes_back[v]), None)

    @staticmethod
    def _readers(graph: Graph, value: int) -> Iterator[int]:
        return (out for op in graph.consumers(value) for out in op.outputs)

    def _again(self, known: _Index, run: Run, value: int, loosely: bool) -> bool:
        tensor = run.tensors[value]
        place = self._norm_outputs.get(value)
        if place is not None and not loosely:  # a fresh batch norm returns its input, which says nothing
            return place.shape == tensor.shape and apart([tensor], [place]) <= self.floor
        return known.has(tensor) or (loosely and tensor.dim() > 1 and known.has(tensor - tensor.mean(-1, keepdim=True)))

    @cached_property
    def parting(self) -> Pair | None:
        """The first norm that makes another output than its counterpart of the same input.

        Told for certain only where every matrix is the reference's: then nothing behind the norm makes up for it. A
        small branch on a large stream hides such a norm from the search for lost values.
        """
        if self.same_weights < 1:
            return None
        for pair in self.pairs:
            ends = [(self._of_pair(pair, end)) for end in ("input", "output")]
            if all(a is not None and b is not None and a.shape == b.shape for a, b in ends):
                near, far = (apart([a], [b]) for a, b in ends if a is not None and b is not None)
                if near <= _AGREE and far > self.floor:
                    return pair
        return None

    def _of_pair(self, pair: Pair, end: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what both norms of a pair read ("input") or return ("output")."""
        found = []
        for run, call in zip(self.runs, (pair.mine, pair.theirs), strict=True):
            value = getattr(call, end)
            here = value if run.pairs is None else run.pairs.get(value)
            found.append(None if here is None else run.tensors.get(here))
        return found[0], found[1]

    @cached_property
    def _norm_outputs(self) -> dict[int, torch.Tensor]:
        """What the reference's norms return, by the output of the model's norm in the same place."""
        mine, theirs = self.runs
        found = {}
        for pair in self.pairs:
            here = pair.mine.output if mine.pairs is None else mine.pairs.get(pair.mine.output)
            there = pair.theirs.output if theirs.pairs is None else theirs.pairs.get(pair.theirs.output)
            if here is not None and there is not None and there in theirs.tensors:
                found[here] = theirs.tensors[there]
        return found

    def _theirs(self, loosely: bool) -> Iterable[torch.Tensor]:
        run = self.runs[1]
        yield from run.tensors.values()
        for call in self.facts.norm_calls.norms if loosely else ():
            yield from self._bare(run, call)

    def _bare(self, run: Run, call: NormCall) -> Iterator[torch.Tensor]:
        """Yield what a norm reads less its mean, and what it returns less its shift and gain."""
        try:
            x, y = run.like(call.input), run.like(call.output)
        except NotKnown:
            return
        yield x - x.mean(-1, keepdim=True)
        if call.spec is None or call.spec.axes != (-1,):
            return
        bias, weight = (self.tensor(self.facts, v) for v in (call.bias, call.weight))
        if bias is not None:
            y = y - bias
        if weight is not None:
            y = y / (weight + call.spec.weight_offset)
        yield y

    @staticmethod
    def tensor(facts: Facts, value: int | None) -> torch.Tensor | None:
        """Return the parameter or buffer behind a value."""
        if value is None:
            return None
        held = facts.tensors
        return next((held[n].detach() for n in facts.graph.values[value].names if n in held), None)


class _Index:
    """Finds tensors by their numbers, whatever their shape."""

    def __init__(self, tensors: Iterable[torch.Tensor], floor: float) -> None:
        self._floor = floor
        self._directions: dict[int, torch.Tensor] = {}
        self._known: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in tensors:
            if (mark := self._mark(tensor)) is not None:
                self._known[tensor.numel()].append(mark)
        self._stacked = {size: torch.stack(marks) for size, marks in self._known.items()}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether some tensor holds the same numbers, up to the floor."""
        mark, there = self._mark(tensor), self._stacked.get(tensor.numel())
        if mark is None or there is None:
            return False
        gaps = (there - mark).square().mean(1).sqrt()
        return bool((gaps <= self._floor * mark.square().mean().sqrt()).any())

    def _mark(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return projections on fixed directions; None for what says nothing: constants, few or infinite numbers."""
        flat = tensor.detach().reshape(-1).to("cpu", torch.float64) if not tensor.is_complex() else None
        if flat is None or flat.numel() < _FEWEST or not flat.isfinite().all() or bool((flat == flat[0]).all()):
            return None
        flat = flat[:: max(1, flat.numel() // _ELEMENTS)]
        return self._along(flat.numel()) @ flat

    def _along(self, size: int) -> torch.Tensor:
        if size not in self._directions:
            generator = torch.Generator().manual_seed(_SEED)
            self._directions[size] = torch.randn(_PROBES, size, generator=generator, dtype=torch.float64, device="cpu")
        return self._directions[size]


def parameters_of(graph: Graph, op: Op) -> tuple[int, ...]:
    """Return the parameters and buffers that an op reads, also through a transpose."""
    found: list[int] = []
    for value in op.inputs:
        producer = graph.producer(value)
        while producer is not None and len(producer.inputs) == 1:
            value = producer.inputs[0]
            producer = graph.producer(value)
        if graph.values[value].kind in (ValueKind.PARAM, ValueKind.BUFFER):
            found.append(value)
    return tuple(dict.fromkeys(found))


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _examined(facts: Facts) -> Facts:
    """Trace the reference on the model's inputs."""
    reference = facts.target.reference
    if reference is None:
        raise NotKnown(
            both("needs a model known to be right: pass reference=...", "需要已知正确的模型：传入 reference=...")
        )
    if not isinstance(reference, nn.Module):
        name = type(reference).__name__
        raise NotKnown(both(f"reference is a {name}, not a module", f"reference 是 {name}，不是模块"))
    if not facts.target.weights.magnitudes_count:
        raise NotKnown(needs.REAL_WEIGHTS)
    facts.runs.base  # noqa: B018 - nothing is compared without it
    facts.spend()
    try:
        found = _run(facts, reference)
    except (NormwiseError, SystemExit) as error:
        why = str(error).partition(". ")[0] if isinstance(error, NormwiseError) else "SystemExit"
    except Exception as error:  # the module is the user's
        why = f"{type(error).__name__}: {error}"[:120]
    else:
        if any(bool(t.isnan().any()) for t in outputs_of(found.runs.base)):
            raise NotKnown(both("the reference returns NaN on the inputs", "参考模型在输入上返回 NaN"))
        return found
    raise NotKnown(both(f"the reference does not run on the inputs: {why}", f"参考模型无法在输入上运行：{why}"))


def _run(facts: Facts, reference: nn.Module) -> Facts:
    dtype = _dtype_of(reference)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    args, kwargs = map_tensors((facts.target.args, dict(facts.target.kwargs)), moved)
    target = Target(model=reference, name="the reference", args=args, kwargs=kwargs, inputs_from=InputsFrom.GIVEN)
    found = type(facts)(target, "full")
    found.runs.base.tensors  # noqa: B018 - it runs here or nowhere
    return found
