"""A norm in plain torch, for modeling files: what ``Norm`` computes, without its kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import nn

from normwise.conversions._edits import Edit, SwapNorm, replace_everywhere
from normwise.spec import NormSpec
from normwise.spec.description import PROMOTED, Cast, Kind, Scope, Weight

__all__ = ["plain_swap"]


class PlainNorm(nn.Module):
    """y = (offset + weight) * (x - mean) / sqrt(mean of squares + eps) + bias, over the last axes."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        axes: tuple[int, ...],
        eps: float,
        center: bool,
        offset: float,
        stats_dtype: str | None,
        early_cast: bool,
        early_offset: bool,
        promoted: bool,
    ) -> None:
        super().__init__()
        self.axes, self.eps, self.center, self.offset, self.stats_dtype = axes, eps, center, offset, stats_dtype
        self.early_cast, self.early_offset, self.promoted = early_cast, early_offset, promoted
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize; statistics run in the wider of ``stats_dtype`` and the dtype of the input."""
        x = input
        if self.stats_dtype is not None:
            x = x.to(torch.promote_types(x.dtype, getattr(torch, self.stats_dtype)))
        if self.center:
            x = x - x.mean(self.axes, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(self.axes, keepdim=True) + self.eps)
        if self.early_cast:
            y = y.to(input.dtype)
        if self.weight is not None:
            y = y * (self.offset + (self.weight if self.early_offset else self.weight.to(x.dtype)))
        if self.bias is not None:
            y = y + self.bias
        return y if self.promoted else y.to(input.dtype)

    def extra_repr(self) -> str:
        """Return what is computed."""
        return f"axes={self.axes}, eps={self.eps}, center={self.center}, offset={self.offset}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlainNorm(Edit):
    """Put a norm in plain torch in another one's place; it takes over the parameters it has a use for."""

    keeps: tuple[str, ...]
    axes: tuple[int, ...]
    eps: float
    center: bool
    offset: float
    stats_dtype: str | None
    early_cast: bool
    early_offset: bool
    promoted: bool

    def apply(self, model: nn.Module) -> None:
        """Replace the module."""
        old = model.get_submodule(self.path)
        told = (self.stats_dtype, self.early_cast, self.early_offset, self.promoted)
        new = PlainNorm(self.axes, self.eps, self.center, self.offset, *told)
        for name in self.keeps:
            setattr(new, name, getattr(old, name))
        replace_everywhere(model, old, new)


_HELD = {
    "axes", "center", "statistic", "eps", "weight", "weight_offset", "bias", "stats_dtype", "cast", "form", "scope",
    "offset_in_weight_dtype", "out_dtype",
}  # fmt: skip


def plain_swap(edit: SwapNorm) -> SwapPlainNorm:
    """Return an edit that needs torch only.

    Raises:
        ValueError: the plain norm cannot compute this spec; the message names the field.
    """
    for name in ("creates", "options", "names", "then"):
        if getattr(edit, name):
            raise ValueError(f"{edit.path}: a norm with {name}={getattr(edit, name)!r} is beyond the plain one")
    spec, usual = edit.norm_spec, NormSpec()
    odd = [f.name for f in fields(NormSpec) if f.name not in _HELD and getattr(spec, f.name) != getattr(usual, f.name)]
    if spec.scope is not Scope.HIDDEN or spec.kind not in (Kind.LAYER, Kind.RMS):
        odd.append("scope" if spec.scope is not Scope.HIDDEN else "statistic")
    odd += [name for name in ("eps",) if spec.eps is None]
    odd += [name for name in ("weight",) if spec.weight is Weight.SCALAR]
    odd += [name for name in ("cast",) if spec.cast in (Cast.TO_WEIGHT, Cast.RECIPROCAL)]
    odd += [name for name in ("out_dtype",) if spec.out_dtype not in (None, PROMOTED)]
    if odd or spec.axes != tuple(range(-len(spec.axes), 0)):
        name = odd[0] if odd else "axes"
        raise ValueError(f"{edit.path}: a norm with {name}={getattr(spec, name)!r} is beyond the plain one")
    assert spec.eps is not None
    early_cast = spec.cast is Cast.BEFORE_WEIGHT
    return SwapPlainNorm(
        path=edit.path, keeps=edit.keeps, axes=spec.axes, eps=spec.eps, center=spec.center, offset=spec.weight_offset,
        stats_dtype=spec.stats_dtype, early_cast=early_cast, early_offset=early_cast or spec.offset_in_weight_dtype,
        promoted=spec.out_dtype == PROMOTED,
    )  # fmt: skip
