"""What is examined: a model, example inputs, and any further evidence the user can give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from normwise.targets.checkpoint.stored import Stored

__all__ = ["InputsFrom", "Target", "Weights", "numberless"]


class InputsFrom(StrEnum):
    """The rung of the input ladder that a report discloses, strongest first."""

    GIVEN = "given"
    FROM_SHAPE = "from-shape"
    INFERRED = "inferred"
    NONE = "none"


class Weights(StrEnum):
    """What the numbers in the model are worth: magnitudes count only on real weights."""

    GIVEN = "given"  # the user's own object: what it holds is what is judged
    REAL = "real"  # trained weights that a package or folder ships
    RANDOM = "random"  # structure only: built small from a configuration
    FAKE = "fake"  # no storage at all (FakeTensor, meta)

    @property
    def magnitudes_count(self) -> bool:
        """Whether numbers are worth judging: not where weights were drawn for a map, or hold no storage."""
        return self in (Weights.GIVEN, Weights.REAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model with everything that is known about how it is used.

    ``args`` and ``kwargs`` are one call of the model. Every other field is optional
    evidence; rules that need a missing one answer "not checked: needs ...".
    """

    model: nn.Module
    name: str = "model"
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    inputs_from: InputsFrom = InputsFrom.GIVEN
    weights: Weights = Weights.GIVEN
    notes: tuple[str, ...] = ()  # what was reduced, generated or assumed, one sentence each
    padded_inputs: Any = None
    lengths: Any = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    checkpoint: Mapping[str, torch.Tensor] | None = None
    reference: nn.Module | None = None
    config: Any = None
    train_step: Callable[..., Any] | None = None
    eval_fn: Callable[..., Any] | None = None
    loader: Iterable[Any] | None = None
    load_info: Any = None
    online: nn.Module | None = None
    dtype: torch.dtype | None = None
    claims: tuple[str, ...] = ()
    inputs_other_rank: Any = None
    stored: Stored | None = None  # a checkpoint by itself; ``model`` then only holds its norms

    def run(self, model: nn.Module | None = None) -> Any:
        """Call the model (or another one in its place) once on the example inputs."""
        return (self.model if model is None else model)(*self.args, **self.kwargs)


def numberless(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no numbers: on meta, or fake. A copy of a fake one breaks the process."""
    return tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor"
