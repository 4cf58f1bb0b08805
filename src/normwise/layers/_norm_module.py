"""What the layers share: a spec, parameters that start neutral, and a representation that shows the convention."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from normwise.spec import NormSpec

__all__ = ["NormModule"]

# Shown by the layer in torch's own words, or said by its name.
_TOLD = frozenset({"axes", "eps", "bias", "weight", "running", "momentum", "groups", "scope"})


class NormModule(nn.Module):
    """A layer that computes its ``spec``; abstract, every layer is final."""

    spec: NormSpec
    usual: NormSpec  # the spec of this class without options: what is not worth showing
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def _register_affine(
        self,
        shape: tuple[int, ...],
        *,
        weight: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.register_parameter("weight", nn.Parameter(torch.empty(shape, **made)) if weight else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(shape, **made)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make gain and shift neutral: a gain of 1 (a weight of 0 with unit offset), a shift of 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.spec.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _convention(self) -> list[str]:
        """Return ``field=value`` for all that differs from the usual spec of this layer."""
        names = [field.name for field in fields(NormSpec) if field.name not in _TOLD]
        values = {name: getattr(self.spec, name) for name in names}
        return [f"{name}={value}" for name, value in values.items() if value != getattr(self.usual, name)]
