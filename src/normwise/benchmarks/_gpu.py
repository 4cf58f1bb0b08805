"""Rivals that need a CUDA device: Liger, torchnorm and QuACK, where they are installed.

Written from their documentation and not run: no GPU was at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from normwise.benchmarks._contest import Built, Rival, Setting

__all__ = ["rivals_of"]


def rivals_of(setting: Setting, *, rms: bool) -> list[Rival]:
    """Return those that are installed and compute this layer over the last axis."""
    if len(setting.shape) != 2:
        return []
    makers = _RMS if rms else _LAYER
    found = []
    for package, (name, plain, added) in makers.items():
        make = added if setting.residual else plain
        if make is not None and find_spec(package) is not None:
            found.append(Rival(name=name, build=_builder(make, setting)))
    return found


def _builder(make: Callable[[int], nn.Module], setting: Setting) -> Callable[[], Built]:
    def build() -> Built:
        module = make(setting.shape[-1]).to(setting.device, setting.dtype)
        return Built(module, tuple(module.parameters()))

    return build


def _liger_rms(size: int) -> nn.Module:
    from liger_kernel.transformers.rms_norm import LigerRMSNorm  # pyright: ignore[reportMissingImports]

    return LigerRMSNorm(size, in_place=False)  # in place it would write into the gradient the rivals share


def _liger_add_rms(size: int) -> nn.Module:
    from liger_kernel.transformers.fused_add_rms_norm import (  # pyright: ignore[reportMissingImports]
        LigerFusedAddRMSNorm,
    )

    return LigerFusedAddRMSNorm(size, in_place=False)


def _liger_layer(size: int) -> nn.Module:
    from liger_kernel.transformers.layer_norm import LigerLayerNorm  # pyright: ignore[reportMissingImports]

    return LigerLayerNorm(size)


def _torchnorm(name: str) -> Callable[[int], nn.Module]:
    def make(size: int) -> nn.Module:
        import torchnorm  # pyright: ignore[reportMissingImports]

        return getattr(torchnorm, name)(size)

    return make


class _Quack(nn.Module):
    """QuACK's function as a module."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        from quack import rmsnorm  # pyright: ignore[reportMissingImports]

        if residual is None:
            return rmsnorm(x, self.weight)
        return rmsnorm(x, self.weight, residual=residual, prenorm=True)


_Makers = dict[str, tuple[str, Callable[[int], nn.Module] | None, Callable[[int], nn.Module] | None]]
_RMS: _Makers = {
    "liger_kernel": ("Liger", _liger_rms, _liger_add_rms),
    "torchnorm": ("torchnorm", _torchnorm("RMSNorm"), _torchnorm("FusedAddRMSNorm")),
    "quack": ("QuACK", _Quack, _Quack),
}
_LAYER: _Makers = {
    "liger_kernel": ("Liger", _liger_layer, None),
    "torchnorm": ("torchnorm", _torchnorm("LayerNorm"), None),
}
