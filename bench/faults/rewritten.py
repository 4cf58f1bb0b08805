"""A norm over the last axis written out step by step: right by itself, each fault overrides one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.faults.case import Case, swap
from normwise.facts.records import NormSite

__all__ = ["Rewritten", "rewrite"]


class Rewritten(nn.Module):
    """LayerNorm or RMSNorm with the parameters, under the names, of the norm whose place it takes."""

    def __init__(self, site: NormSite, old: nn.Module) -> None:
        super().__init__()
        assert site.spec is not None
        self.centred = site.spec.center
        self.eps, self.offset = site.spec.eps or 0.0, site.spec.weight_offset
        for name, parameter in old.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.gain_name = str(site.weight_path).rpartition(".")[2]
        self.shift_name = str(site.bias_path).rpartition(".")[2] if site.bias_path else ""

    @property
    def gain(self) -> Tensor:
        """The stored gain."""
        return getattr(self, self.gain_name)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        h = self.cast(x)
        if self.centred:
            h = h - self.mean(h)
        return self.scale(self.divide(h), x)

    def cast(self, x: Tensor) -> Tensor:
        """Return the input in the dtype of the statistics."""
        return x if x.dtype == torch.float64 else x.float()

    def mean(self, h: Tensor) -> Tensor:
        """Return the mean."""
        return h.mean(-1, keepdim=True)

    def square(self, h: Tensor) -> Tensor:
        """Return the mean square of what is divided."""
        return h.pow(2).mean(-1, keepdim=True)

    def divide(self, h: Tensor) -> Tensor:
        """Divide by the root of the mean square."""
        return h * torch.rsqrt(self.square(h) + self.eps)

    def scale(self, h: Tensor, x: Tensor) -> Tensor:
        """Apply gain and shift and return to the dtype of the input."""
        y = h * (self.gain.to(h.dtype) + self.offset)
        if self.shift_name:
            y = y + getattr(self, self.shift_name).to(h.dtype)
        return y.to(x.dtype)


def rewrite(case: Case, sites: list[NormSite], kind: type[Rewritten], **attributes: Any) -> list[str]:
    """Put a rewritten norm in the place of each site and return their paths."""
    for site in sites:
        new = kind(site, case.module(site.path))
        for name, value in attributes.items():
            setattr(new, name, value)
        swap(case, site.path, new)
    return [site.path for site in sites]
