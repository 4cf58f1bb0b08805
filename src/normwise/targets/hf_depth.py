"""How deep one part of a model is, and how many of its blocks the small model keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from normwise.targets.hf_plan import first_int

__all__ = ["BLOCKS", "LONGEST_PERIOD", "Depth", "is_pattern"]

BLOCKS = 4
LONGEST_PERIOD = 12  # of a pattern of different blocks that is still kept whole
_MAIN_DEPTH = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers", "decoder_layers", "layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """The blocks of one part."""

    total: int | None  # in the configuration as it is
    lists: dict[str, list[Any]]  # what is said of every block
    period: int  # how many of the first blocks show every kind of block
    kept: int

    @classmethod
    def of(cls, config: Any) -> Depth:
        """Read the depth of one part of a configuration."""
        total = first_int(config, _MAIN_DEPTH)
        lists = {
            name: list(value)
            for name, value in (vars(config) | _computed_patterns(config)).items()
            if isinstance(value, list | tuple) and len(value) == total and is_pattern(value)
        }
        period = max((_covering_prefix(kinds) for kinds in lists.values()), default=0)
        kept = max(BLOCKS, period) if period <= LONGEST_PERIOD else BLOCKS
        return cls(total=total, lists=lists, period=period, kept=kept)

    def index(self, layer: int) -> int:
        """Return the block of the small part that stands for one of the whole; the last ones are counted back."""
        if layer < 0:
            return max(layer, -min(self.kept, self.total or self.kept))
        return min(layer * self.kept // self.total, self.kept - 1) if self.total else layer

    def indices(self, layers: list[int], *, kinds: bool) -> list[int]:
        """Return the blocks of the small part that stand for some of the whole.

        Args:
            layers: numbers of blocks.
            kinds: they are of one kind, and the others of another: where not all were, not all are.
        """
        if max(layers) < self.kept:
            return layers
        spread = sorted({self.index(layer) for layer in layers})
        if not kinds or len(spread) < self.kept or not self.total or len(layers) >= self.total:
            return spread
        return spread[-max(1, round(len(layers) * self.kept / self.total)) :]


def is_pattern(value: Any, kinds: int = 6) -> bool:
    """Tell whether a list names kinds of blocks: short words or numbers, few of them different."""
    return all(isinstance(item, str | int | float) for item in value) and len(set(value)) <= kinds


def _covering_prefix(kinds: list[Any]) -> int:
    """Return how many of the first blocks show every kind of block."""
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _computed_patterns(config: Any) -> dict[str, Any]:
    names = ("layer_types", "layers_block_type")
    return {name: getattr(config, name, None) for name in names if name not in vars(config)}
