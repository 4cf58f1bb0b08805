"""The handwritten digits that images are classified by: 1797 of 8 x 8 points, beside this file.

They are the test part of Optical Recognition of Handwritten Digits (E. Alpaydin and C. Kaynak 1998, UCI Machine
Learning Repository, doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn distributes it (BSD 3-Clause); see NOTICE.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file

__all__ = ["CLASSES", "Digits", "digits"]

CLASSES = 10
_LARGEST = 16  # of a point: the dots that are set in a field of 4 x 4
_TRAINED_ON = 1200  # in the order of the file, where one hand's digits stand together: the rest is by other hands


@dataclass(frozen=True)
class Digits:
    """All images and labels, with their hash."""

    images: torch.Tensor  # uint8 [1797, 8, 8], 0 to 16
    labels: torch.Tensor  # uint8 [1797]
    digest: str  # SHA-256, hexadecimal

    @cached_property
    def training(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images, float32 [1200, 1, 8, 8] from 0 to 1, and labels, int64."""
        return self._part(slice(_TRAINED_ON))

    @cached_property
    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images, float32 [597, 1, 8, 8] from 0 to 1, and labels, int64."""
        return self._part(slice(_TRAINED_ON, None))

    def _part(self, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[which].unsqueeze(1).float() / _LARGEST, self.labels[which].long()


@cache
def digits() -> Digits:
    """Read the images and labels."""
    read = load_file(Path(__file__).with_name("digits.safetensors"))
    digest = hashlib.sha256(read["images"].numpy().tobytes() + read["labels"].numpy().tobytes())
    return Digits(read["images"], read["labels"], digest.hexdigest())
