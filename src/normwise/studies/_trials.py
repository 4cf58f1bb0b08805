"""Trials: which ones a study asks for, and what makes two of them the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["Trial", "asked", "seconds"]

_MOST_SEEDS = 1000  # far more than a spread needs; the trials of a slip of the keyboard would fill the memory
_START = 3.0  # CPU-s of a process that imports torch and a study


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement: its study, the version of it, and the parameters with the seed.

    Examples:
        >>> Trial("warmup", 1, {"rate": 0.001, "seed": 0}).key == Trial("warmup", 1, {"seed": 0, "rate": 1e-3}).key
        True
    """

    study: str
    version: int
    params: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Return what identifies it: a hash of study, version and parameters, whatever their order."""
        said = json.dumps([self.study, self.version, self.params], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(said.encode()).hexdigest()[:32]


def seconds(part: ModuleType, params: Mapping[str, Any]) -> float:
    """Return the CPU-seconds that a trial of a study takes, the start of its process included."""
    return _START + part.seconds(params)


def asked(name: str, part: ModuleType, *, quick: bool, seeds: int | None = None) -> list[Trial]:
    """Return the trials of a study, seed by seed, so that an interrupted run has whole sets.

    Args:
        name: of the study.
        part: its module.
        quick: the small set, one seed.
        seeds: how many; by default 1 for the small set and the study's own number for the full one.

    Raises:
        ValueError: less than one seed, or far too many, or several of a study in which nothing is random.
    """
    count = (1 if quick else part.SEEDS) if seeds is None else seeds
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"a study takes a whole number of seeds, 1 or more, given {seeds!r}")
    if count > _MOST_SEEDS:
        raise ValueError(f"a study takes {_MOST_SEEDS} seeds at most, given {count}")
    if part.SEEDS == 1 and count > 1:
        raise ValueError(f"nothing is random in {name}: it takes one seed, given {count}")
    params = part.trials(quick)
    return [Trial(name, part.VERSION, {**each, "seed": seed}) for seed in range(count) for each in params]
