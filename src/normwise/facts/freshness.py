"""Whether a model still stands where training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["CENTRED", "FEWEST", "MINORITY", "around_zero", "untrained"]

# Of 8 draws around 0 all have one sign with probability 1/128. Gains that were set have one.
FEWEST = 8
MINORITY = 0.1
# |mean| / rms of n draws around 0 is 1/sqrt(n): 0.35 at n = 8; a gain that was set has 0.9 and more.
CENTRED = 0.7


def around_zero(gain: torch.Tensor, *, minority: float = MINORITY, centred: float = CENTRED) -> bool:
    """Whether an effective gain lies around 0 with both signs: it was drawn, not set."""
    gain = gain.detach().double().flatten()
    if len(gain) < FEWEST or bool((gain == gain[0]).all()):
        return False
    negative = float((gain < 0).double().mean())
    rms = float(gain.square().mean().sqrt())
    return minority <= negative <= 1 - minority and abs(float(gain.mean())) <= centred * rms


def untrained(facts: Facts) -> bool:
    """Whether the weights are as drawn; where that cannot be told, whether every gain is one number throughout.

    DeepNorm draws parts of one matrix with two gains, which looks like no draw at all; training moves each channel of
    a norm's gain on its own.
    """
    trained = facts.gains.trained
    if trained is None:
        gains = facts.gains.all
        return bool(gains) and all(g.constant is not None for g in gains)
    return not trained
