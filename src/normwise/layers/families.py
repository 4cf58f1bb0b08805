"""The norm conventions of model families, by name: what ``RMSNorm.like(...)`` and ``LayerNorm.like(...)`` look up."""

from __future__ import annotations

from dataclasses import replace

from normwise.spec import PROMOTED, Cast, Form, Gate, NormSpec, Statistic, Weight

__all__ = ["FAMILIES", "family_spec"]

_LLAMA = NormSpec(eps=1e-6, cast=Cast.BEFORE_WEIGHT, out_dtype=PROMOTED)
_OLMO2 = NormSpec(eps=1e-6, cast=Cast.AFTER_WEIGHT)
_LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, form=Form.TORCH)

FAMILIES: dict[str, NormSpec] = {
    "bert": replace(_LAYER, eps=1e-12),
    "cohere": replace(_LAYER, bias=False, form=Form.RECIPROCAL, cast=Cast.AFTER_WEIGHT),
    "deberta": replace(_LAYER, eps=1e-7, form=Form.DIVISION, cast=Cast.BEFORE_WEIGHT, out_dtype=PROMOTED),
    "gemma": replace(_OLMO2, weight_offset=1.0),
    "gemma3n": _OLMO2,
    "gpt2": _LAYER,
    "llama": _LLAMA,
    "llama4": replace(_LLAMA, eps=1e-5),
    "nemotron": replace(_LAYER, weight_offset=1.0, offset_in_weight_dtype=True),
    "olmo": replace(_LAYER, weight=Weight.NONE, bias=False, cast=Cast.AFTER_WEIGHT),
    "olmo2": _OLMO2,
    "t5": NormSpec(eps=1e-6, cast=Cast.TO_WEIGHT, out_dtype=PROMOTED),
}


def family_spec(family: str, usual: NormSpec) -> NormSpec:
    """Return the spec of a family's norm, which must be of the kind of ``usual``, and gated if that is.

    Raises:
        ValueError: no such family, or its norm is of another kind.
    """
    spec = FAMILIES.get(family.lower().replace("_", "-"))
    known = ", ".join(sorted(name for name, each in FAMILIES.items() if _form(each) == _form(usual)))
    if spec is None:
        raise ValueError(f"no family {family!r} is known here; pass spec=, or one of: {known}")
    if _form(spec) != _form(usual):
        raise ValueError(f"the norm of {family!r} is {_form(spec)}, asked for {_form(usual)}; use one of: {known}")
    return spec


def _form(spec: NormSpec) -> str:
    return f"{'gated ' * (spec.gate is not Gate.NONE)}{spec.kind}"
