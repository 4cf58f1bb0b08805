"""The randomised twin: a model of the same structure on which a wrong conversion cannot look exact.

On a fresh model every gain is 1, every bias 0 and every mean about 0, so a forgotten gain, bias or centring changes
nothing; trained means may be 1e-7. The twin has gains N(1, 0.4), biases N(0, 0.5), other running statistics, and
every other tensor redrawn with its own scale, or a larger one where that is tiny, with a mean along every axis.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from normwise.conversions._apply import has_storage, tensors_of
from normwise.conversions._plan import Plan
from normwise.conversions.proof.double import doubled
from normwise.errors import NotKnown
from normwise.facts import running
from normwise.facts.facts import Facts
from normwise.facts.records import NormSite
from normwise.facts.state_dicts import pattern
from normwise.rendering import both
from normwise.targets import Target

__all__ = ["Twin", "calibrate", "fits", "free_memory", "norms_of", "redraw", "scaled_to", "twin_of"]

_SEED = 20261129
_SMALL = 64_000_000  # parameters: 2 GB for the twin, the same at the size of eps, and their conversions
_GAINS, _BIASES, _MEAN = 0.4, 0.5, 0.5  # of gains and biases the spread; of other tensors the mean, in their spread
_LEAST = 0.3  # mean of a vector of one number, such as a LayerScale of 1e-6: what it scales must show
_SMALLEST = 0.5  # spread of a matrix, in that which keeps the size of what it is applied to
_NOTHING = 1e-2  # a vector below is a fresh bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A model to be randomised, with the plan that converts it.

    Args:
        target: the twin in float64, and its inputs.
        plan: the model's own, or of the same conversion on the small twin.
        norms: its norms.
        note: what the twin is.
    """

    target: Target
    plan: Plan
    norms: tuple[NormSite, ...]
    note: str


def twin_of(plan: Plan, target: Target, norms: tuple[NormSite, ...], replan: Callable[[Target], Plan]) -> Twin:
    """Return the twin of a model, yet to be redrawn: a copy, or a small model of the same class of a large one.

    Args:
        plan: of the model.
        target: the model, which stays as it is.
        norms: of the model.
        replan: makes the plan of the same conversion for another target.

    Raises:
        NotKnown: neither can be had.
    """
    count = sum(p.numel() for p in target.model.parameters())
    stored = has_storage(target.model)
    if stored and count <= _SMALL:
        return _copied(plan, target, norms)
    try:
        return _shrunk(plan, target, replan)
    except NotKnown:
        if stored and fits(target.model):
            return _copied(plan, target, norms)
        raise


def fits(model: nn.Module, copies: int = 2) -> bool:
    """Whether float64 copies of a model fit in half of the memory that is free; True where that is not known."""
    needed = 8 * copies * sum(p.numel() for p in model.parameters())
    free = free_memory()
    return free is None or needed <= free / 2


def free_memory() -> int | None:
    """Return how many bytes are free, None where that is not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return None


def norms_of(target: Target) -> tuple[NormSite, ...]:
    """Return the norms of a target, from one traced run."""
    return tuple(site.row for site in Facts(target, effort="full").sites)


def _copied(plan: Plan, target: Target, norms: tuple[NormSite, ...]) -> Twin:
    model = doubled(copy.deepcopy(target.model)).eval()
    note = both("a copy with every weight redrawn", "所有权重重新抽取的副本")
    return Twin(target=dataclasses.replace(target, model=model), plan=plan, norms=norms, note=note)


# -- a small model of the same class --------------------------------------------------------


def _shrunk(plan: Plan, target: Target, replan: Callable[[Target], Plan]) -> Twin:
    small = _small_target(target)
    norms = norms_of(small)
    redraw(small.model, norms, constants=plan.constants)  # a fresh model may have nothing to convert: no gain but 1
    made = replan(small)
    if _signature(made, small.model) != _signature(plan, target.model):
        raise NotKnown(
            both(
                "the small model of the same class is converted in another way, so it proves nothing about this one",
                "同类的小模型以另一种方式转换，不能证明此模型",
            )
        )
    model = doubled(small.model)
    count = sum(p.numel() for p in model.parameters())
    note = both(
        f"a small model of the same class ({count:,} parameters), planned anew",
        f"同类的小模型（{count:,} 个参数），重新规划",
    )
    return Twin(target=dataclasses.replace(small, model=model), plan=made, norms=norms, note=note)


def _small_target(target: Target) -> Target:
    """Return the class of a transformers model with its configuration made small, and inputs for it."""
    from normwise.targets.hf_build import quiet
    from normwise.targets.hf_config import shrunk
    from normwise.targets.hf_inputs import find_inputs

    config = getattr(target.model, "config", None)
    if not hasattr(config, "model_type"):
        raise NotKnown(
            both(
                "needs a model with weights, of at most 64 million parameters, or one of transformers, for a twin",
                "需要带权重且不超过 6400 万参数的模型或 transformers 模型，才能造出孪生模型",
            )
        )
    try:
        with quiet():
            model = type(target.model)(shrunk(config)).eval()
            kwargs = find_inputs(model).kwargs
    except Exception as error:  # whatever transformers raises on a configuration
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        why = f"a small model of the same class cannot be had: {said}"
        raise NotKnown(both(why, f"无法得到同类的小模型：{said}")) from error
    return Target(model=model, name=target.name, kwargs=kwargs, config=model.config)


def _signature(plan: Plan, model: nn.Module) -> set[object]:
    """Return what a plan does to each kind of module and tensor, block numbers and sizes apart.

    A kind is marked where the plan covers all of its tensors: a plan that forgets one block has another signature.
    """
    totals = Counter(pattern(name) for name in tensors_of(model))
    covered = Counter(pattern(key) for recipe in plan.recipes for key in recipe.keys)
    tensors: set[object] = {
        (
            tuple(sorted(map(pattern, recipe.keys))),
            tuple((step.function, tuple(map(pattern, step.reads))) for step in recipe.steps),
            all(covered[pattern(key)] == totals[pattern(key)] for key in recipe.keys),
        )
        for recipe in plan.recipes
    }
    return tensors | {(edit.kind, pattern(edit.path)) for edit in plan.edits}


# -- redrawing -------------------------------------------------------------------------------


def redraw(
    model: nn.Module,
    norms: tuple[NormSite, ...],
    *,
    seed: int = _SEED,
    gentle: bool = False,
    constants: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Redraw every parameter and every running statistic in place; other buffers stay.

    Args:
        model: in float64.
        norms: its norms, whose gains and biases are drawn as such.
        seed: of the numbers.
        gentle: other vectors and numbers keep their signs: some must stay positive.
        constants: by key, the number that a tensor holds instead, since the plan relies on it.
    """
    draw = _Draw(seed)
    gains, biases = _affine(model, norms)
    with torch.no_grad():
        for tensor in _drawn(model, norms):
            if id(tensor) in gains:
                tensor.copy_(1 + _GAINS * draw.noise(tensor) - gains[id(tensor)])
            elif id(tensor) in biases:
                tensor.copy_(_BIASES * draw.noise(tensor))
            elif tensor.dim() > 1:
                tensor.copy_(draw.matrix(tensor))
            else:
                tensor.copy_(draw.positive(tensor) if gentle else draw.vector(tensor))
        for statistics in running.read(model):
            spread = statistics.var.clamp_min(1e-3).sqrt()
            if statistics.mean is not None:
                statistics.mean.copy_(_BIASES * spread * draw.noise(statistics.mean))
            statistics.var.copy_(statistics.var.clamp_min(1e-3) * draw.positive(torch.ones_like(statistics.var)))
        held = tensors_of(model)
        for key in constants.keys() & held.keys():  # a smaller twin has fewer layers
            held[key].fill_(constants[key])


def _drawn(model: nn.Module, norms: tuple[NormSite, ...]) -> Iterator[torch.Tensor]:
    """Yield the parameters, and the gains and biases of norms that are buffers (a frozen BatchNorm's)."""
    parameters = {id(p): p for p in model.parameters() if p.is_floating_point()}
    affine = {name for site in norms for name in (site.weight_path, site.bias_path)}
    yield from parameters.values()
    yield from (b for name, b in model.named_buffers() if name in affine and b.is_floating_point())


def _affine(model: nn.Module, norms: tuple[NormSite, ...]) -> tuple[dict[int, float], set[int]]:
    """Return the offsets of the gains and the biases, by id of the tensor."""
    tensors = tensors_of(model)
    gains = {
        id(tensors[site.weight_path]): site.spec.weight_offset if site.spec else 0.0
        for site in norms
        if site.weight_path in tensors
    }
    return gains, {id(tensors[site.bias_path]) for site in norms if site.bias_path in tensors}


class _Draw:
    """Random numbers for tensors of every kind."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def noise(self, like: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(like.shape, generator=self._generator, dtype=torch.float64, device="cpu")
        return noise.to(like.device)

    def _sign(self) -> float:
        return 1.0 if torch.rand((), generator=self._generator, device="cpu") < 0.5 else -1.0

    def matrix(self, old: torch.Tensor) -> torch.Tensor:
        """Return numbers of the same spread with a mean along every axis; a tiny one leaves attention even.

        The means along an axis have random signs: of one sign, they would drive all units of a layer to one side.
        """
        spread = max(_spread(old), _SMALLEST / math.sqrt(max(old[0].numel(), 1)))
        axes = [axis for axis, size in enumerate(old.shape) if size > 1]
        means = [self.noise(old.narrow(axis, 0, 1)).sign() for axis in axes]
        drawn = self.noise(old)
        for mean in means:
            drawn = drawn + _MEAN * mean
        return spread / math.sqrt(1 + len(means) * _MEAN**2) * drawn

    def vector(self, old: torch.Tensor) -> torch.Tensor:
        """Return numbers of the same mean and spread; of one number a gain, of next to nothing a bias."""
        spread, mean = _spread(old), float(old.mean()) if old.numel() else 0.0
        if spread == 0 and mean != 0:
            return math.copysign(max(abs(mean), _LEAST), mean) * (1 + _GAINS * self.noise(old))
        if max(spread, abs(mean)) < _NOTHING:
            spread, mean = _BIASES, 0.0
        return mean + spread * (self.noise(old) + self._sign() * _MEAN)

    def positive(self, old: torch.Tensor) -> torch.Tensor:
        """Return numbers of the same signs, up to a factor of about 1.5."""
        return old * (_GAINS * self.noise(old)).exp()


def _spread(tensor: torch.Tensor) -> float:
    """Return the standard deviation; 0 for one number many times over."""
    if tensor.numel() < 2 or bool((tensor == tensor.flatten()[0]).all()):
        return 0.0
    return float(tensor.std(correction=0))


def calibrate(model: nn.Module, run: Callable[[nn.Module], object], *, seed: int = _SEED) -> None:
    """Draw running statistics anew about those of the data, layer after layer, in one run of the model.

    Drawn without regard to the data they let the signal die in a few activations, and the twin sees nothing.

    Args:
        model: redrawn.
        run: runs the model that it is given.
        seed: of the numbers.
    """
    draw = _Draw(seed)

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        found = running.measured(module, args[0]) if args and isinstance(args[0], torch.Tensor) else None
        held = next((h for h in running.read(module) if not h.path), None)
        if found is not None and held is not None and bool((found.var > 0).all()):
            held.var.copy_(found.var * draw.positive(torch.ones_like(found.var)))
            if held.mean is not None:
                held.mean.copy_(found.mean + _BIASES * found.var.sqrt() * draw.noise(found.mean))

    modules = dict(model.named_modules())
    hooks = [modules[held.path].register_forward_pre_hook(hook) for held in running.read(model)]
    try:
        if hooks:
            run(model)
    finally:
        for handle in hooks:
            handle.remove()


def scaled_to(model: nn.Module, norms: tuple[NormSite, ...], eps: float) -> Any:
    """Scale a twin in place so that what its norms read has a variance of about ``eps``."""
    gains, biases = _affine(model, norms)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and id(parameter) not in gains and id(parameter) not in biases:
                parameter.mul_(math.sqrt(eps))
        for statistics in running.read(model):
            statistics.var.mul_(eps)
            if statistics.mean is not None:
                statistics.mean.mul_(math.sqrt(eps))
