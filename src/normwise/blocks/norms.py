"""The norms of a model, by a name, a family or a spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from normwise import layers
from normwise.placements._asked import advice
from normwise.spec import FAMILIES, Kind, NormSpec, family_name

__all__ = ["MakeNorm", "norm_maker"]

MakeNorm = Callable[[int], nn.Module]


def norm_maker(norm: str | NormSpec, eps: float | None = None) -> MakeNorm:
    """Return what makes a norm of a number of features.

    Args:
        norm: "rms", "layer", "scale", the name of a model family ("llama", "gemma", ...), or a spec.
        eps: instead of the usual one.

    Raises:
        TypeError: neither a name nor a spec.
        ValueError: neither a kind nor a family; near names are listed.

    Examples:
        >>> norm_maker("gemma")(8)
        RMSNorm((8,), eps=1e-06, elementwise_affine=True, weight_offset=1.0)
    """
    if not isinstance(norm, str | NormSpec):
        raise TypeError(f"norm is the name of a kind or of a model family, or a NormSpec, given {norm!r}")
    if isinstance(norm, str) and norm in _KINDS:
        kind = _KINDS[norm]
        return lambda size: kind(size) if eps is None else kind(size, eps=eps)
    spec = norm if isinstance(norm, NormSpec) else FAMILIES.get(family_name(norm))
    if spec is None:
        hint = advice(norm, [*_KINDS, *FAMILIES], [*_KINDS, "a family of layers.FAMILIES"])
        raise ValueError(f"norm={norm!r} is neither a kind of norm nor a model family; {hint}")
    spec = spec if eps is None else replace(spec, eps=eps)
    if spec.kind is Kind.LAYER:
        return lambda size: layers.LayerNorm(size, bias=spec.bias, spec=spec)
    if spec.kind is Kind.RMS:
        return lambda size: layers.RMSNorm(size, spec=spec)
    return lambda size: layers.Norm(spec, size)


_KINDS: dict[str, Callable[..., nn.Module]] = {
    "rms": layers.RMSNorm,
    "layer": layers.LayerNorm,
    "scale": layers.ScaleNorm,
}
