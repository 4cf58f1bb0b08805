"""A healthy model with its evidence, and the means to put a fault into it.

Norms are found by the map and never by class names, so that an injector fits every architecture.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normwise.facts.records import NormSite, Place, Placement

__all__ = ["Case", "Fault", "Unfit", "mixin", "rows", "swap"]

Observed = dict[str, torch.Tensor]


class Unfit(Exception):
    """The fault cannot be put into this architecture; the text says what it lacks."""


@dataclass(eq=False)
class Case:
    """A model, one call's inputs and the evidence given to the check, with its map made while it was healthy."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    norms: tuple[NormSite, ...]
    placement: Placement
    evidence: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    random: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def inputs(self) -> tuple[Any, ...] | dict[str, Any]:
        """What ``nw.check`` takes as inputs."""
        return self.args or self.kwargs

    def call(self, model: nn.Module | None = None) -> Any:
        """Run the model, or a copy of it, on the inputs."""
        return (self.model if model is None else model)(*self.args, **self.kwargs)

    def copied(self) -> Case:
        """Return a case of its own: model, evidence and what they share are copied together."""
        twin = copy.copy(self)
        shared = copy.deepcopy({"model": self.model, "evidence": self.evidence, "kwargs": self.kwargs})
        twin.model, twin.evidence, twin.kwargs = shared["model"], shared["evidence"], shared["kwargs"]
        return twin

    def module(self, path: str) -> Any:
        """Return a module by its path."""
        return self.model.get_submodule(path)

    def vectors(self, *kinds: str, places: Iterable[Place] = (), shared: bool = False) -> list[NormSite]:
        """Return norms over the last axis that are a module by themselves, with a vector gain of their own.

        Args:
            kinds: "layer", "rms" or both, as the map says.
            places: where they stand; anywhere by default.
            shared: also those that stand in several places.

        Raises:
            Unfit: there is none.
        """
        wanted = set(places)
        plain = [s for s in self.norms if _plain(s, kinds or ("layer", "rms")) and (shared or s.calls == 1)]
        found = [s for s in plain if not wanted or s.placement in wanted]
        found = [s for s in found if not list(self.module(s.path).children())]
        if not found:
            raise Unfit(f"no {' or '.join(kinds) or 'layer or rms'} norm with a gain of its own stands there")
        return found

    def batch_norms(self) -> list[NormSite]:
        """Return the batch norms with running statistics.

        Raises:
            Unfit: there is none.
        """
        found = [s for s in self.norms if s.spec and s.spec.running and "#" not in s.path]
        found = [s for s in found if isinstance(self.module(s.path), nn.modules.batchnorm._BatchNorm)]
        if not found:
            raise Unfit("no batch norm")
        return found

    def some(self, sites: Sequence[NormSite], *, one: bool = False) -> list[NormSite]:
        """Return one site, or in every third case all of its class: a fault sits in one place or in the code of all."""
        chosen = self.random.choice(sites)
        if one or self.random.random() < 2 / 3:
            return [chosen]
        kind = type(self.module(chosen.path))
        return [s for s in sites if type(self.module(s.path)) is kind]

    def tokens(self) -> list[str]:
        """Return the names of the arguments that hold token ids; an encoder and a decoder read one each.

        Raises:
            Unfit: there is none.
        """
        named = (*((str(i), v) for i, v in enumerate(self.args)), *self.kwargs.items())
        tensors = {name: value for name, value in named if isinstance(value, torch.Tensor) and value.ndim == 2}
        found = [n for n, t in tensors.items() if t.dtype == torch.long and bool((t > 1).any())]  # and no mask
        if not found:
            raise Unfit("no token ids among the inputs")
        return found

    def sequences(self) -> None:
        """Refuse what is no sequence model.

        Raises:
            Unfit: the inputs are no token ids.
        """
        self.tokens()


def _plain(site: NormSite, kinds: Sequence[str]) -> bool:
    spec = site.spec
    return (
        spec is not None
        and str(spec.kind) in kinds
        and "#" not in site.path
        and spec.axes == (-1,)
        and str(spec.weight) == "vector"
        and spec.partial == 1.0
        and not spec.weight_on_input
        and str(spec.gate) == "none"
        and str(spec.modulation) == "none"
        and site.weight_path is not None
        and site.weight_path.rpartition(".")[0] == site.path
    )


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to break a model.

    Args:
        name: kebab-case, unique.
        codes: rules of which any names the cause.
        what: the fault in one sentence of English, and in Chinese.
        inject: changes the case in place and returns the paths of the modules at fault; raises ``Unfit``.
        setting: what the check is given besides model and inputs, a name of ``settings.SETTINGS``.
        dtype: of the model.
        effects: further rules that report what follows from this fault by their own pages.
        information: the rule's page says that the finding is no more than worth knowing.
        observe: what shows whether the fault is alive; outputs, gradients and buffers by default.
        rows: it is observed in the dtype of the model, which rounds accordingly.
        bits: any difference of a bit shows that it is alive.
    """

    name: str
    codes: tuple[str, ...]
    what: tuple[str, str]
    inject: Callable[[Case], Sequence[str]]
    setting: str = "plain"
    dtype: torch.dtype = torch.float32
    effects: tuple[str, ...] = ()
    information: bool = False
    observe: Callable[[Case], Observed] | None = None
    rows: bool = False
    bits: bool = False


def swap(case: Case, path: str, module: nn.Module) -> None:
    """Put a module in the place of another, in its mode and dtype."""
    old = case.module(path)
    owner, _, name = path.rpartition(".")
    module.train(old.training)
    setattr(case.module(owner), name, module)


def mixin(module: nn.Module, **methods: Any) -> None:
    """Give one module methods of its own by a subclass: copies of the model keep them."""
    base = type(module)
    module.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, **methods})


def rows(width: int, dtype: torch.dtype, count: int = 16) -> torch.Tensor:
    """Return normal rows, the last of which has one element of 400."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(3))
    x[-1, width // 2] = 400.0
    return x.to(dtype)
