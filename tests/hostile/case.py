"""What a crafted file is: how it is made, what is wrong with it, and the word by which the refusal has to name that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Case"]


@dataclass(frozen=True, slots=True)
class Case:
    """One crafted file.

    ``word`` is empty where the file is sound however odd it looks: it is then read.
    """

    defect: str
    file: str  # what is given to the command, in the folder that ``make`` fills
    word: str
    make: Callable[[Path], object]

    @property
    def sound(self) -> bool:
        """Whether it has to be read."""
        return not self.word
