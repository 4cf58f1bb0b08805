"""Whether a model still stands where training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normwise.facts.facts import Facts

__all__ = ["untrained"]


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
