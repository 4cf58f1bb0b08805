"""Models and files of a size that nobody has, and what a check of each says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normwise as nw
from normwise.checkup import reports
from tests.hostile.commands import run
from tests.hostile.safetensors_files import many

__all__ = ["chain", "long_name", "many_modules", "many_tensors", "nested"]


class Block(nn.Module):
    """A pre-norm branch."""

    def __init__(self, name: str = "norm", eps: float = 1e-5, width: int = 8) -> None:
        super().__init__()
        self.name, self.mix = name, nn.Linear(width, width)
        self.add_module(name, nn.LayerNorm(width, eps=eps))

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch."""
        return x + self.mix(self.get_submodule(self.name)(x))


class Branches(nn.Module):
    """Pairs of a norm and a layer, of which the first is run."""

    def __init__(self, pairs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(pairs))
        self.layers = nn.ModuleList(nn.Identity() for _ in range(pairs))

    def forward(self, x: Tensor) -> Tensor:
        """Run one pair."""
        return self.layers[0](self.norms[0](x))


def long_name(length: int) -> dict[str, int]:
    """Return the characters of each report on a model with names of a length."""
    model = nn.Sequential(*(Block("x" * length, eps=100.0) for _ in range(3)))
    report = nw.check(model, torch.randn(2, 3, 8))
    return {name: len(reports.render(report, name)) for name in reports.names()}


def many_modules(count: int) -> dict[str, int]:
    """Check a model of so many modules, half of them norms, and show it."""
    report = nw.check(Branches(count // 2), torch.randn(2, 4), effort="read")
    for name in reports.names():
        reports.render(report, name)
    return {"norms": len(report.norms), "unrun": len(report.not_executed)}


def chain(count: int) -> dict[str, int]:
    """Check so many residual blocks in a row."""
    torch.manual_seed(0)
    report = nw.check(nn.Sequential(*(Block() for _ in range(count))), torch.randn(2, 3, 8), effort="read")
    return {"norms": len(report.norms)}


def nested(levels: int, folder: str) -> dict[str, Any]:
    """Check a norm below so many modules, as a user gives it."""
    path = Path(folder) / "deep.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n\ndef build():\n    model = nn.LayerNorm(4)\n"
        f"    for _ in range({levels}):\n        model = nn.Sequential(model)\n    return model, torch.randn(2, 4)\n"
    )
    return run(["check", f"{path}:build", "--isolated", "--fail-on", "never"], folder)


def many_tensors(count: int, folder: str) -> dict[str, Any]:
    """Check a file of so many tensors without elements."""
    path = Path(folder) / "model.safetensors"
    path.write_bytes(many(count))
    return run(["check", str(path), "--isolated"], folder)
