"""The text that models are trained on: the sources of Python's standard library, as bytes. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

__all__ = ["VOCABULARY", "Corpus", "corpus"]

VOCABULARY = 256  # a token is a byte
_HELD_OUT = 10  # every tenth file is for validation: whole files, or the model would have seen their other half


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to validate on, with the hash of all."""

    training: torch.Tensor  # uint8 [bytes]
    validation: torch.Tensor
    digest: str  # SHA-256, hexadecimal

    @cached_property
    def frequencies(self) -> torch.Tensor:
        """Return how frequent each byte is in the training part, one count added to each: float64 [256]."""
        counts = torch.bincount(self.training.long(), minlength=VOCABULARY).double() + 1
        return counts / counts.sum()

    def batch(self, size: int, length: int, generator: torch.Generator, *, held_out: bool = False) -> torch.Tensor:
        """Return random windows, int64 [size, length + 1]: inputs, and targets one byte later."""
        source = self.validation if held_out else self.training
        starts = torch.randint(len(source) - length, (size, 1), generator=generator)
        return source[starts + torch.arange(length + 1)].long()


@cache
def corpus() -> Corpus:
    """Read the modules at the top of the standard library, in the order of their names: about 4.7 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    contents = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "big") + content)
    held_out = b"".join(contents[_HELD_OUT - 1 :: _HELD_OUT])
    del contents[_HELD_OUT - 1 :: _HELD_OUT]
    return Corpus(_tensor(b"".join(contents)), _tensor(held_out), digest.hexdigest())


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
