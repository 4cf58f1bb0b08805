"""Looks up the norm of a model family: what ``RMSNorm.like(...)`` and ``LayerNorm.like(...)`` do with a name."""

from __future__ import annotations

from difflib import get_close_matches

from normwise.spec import FAMILIES as FAMILIES
from normwise.spec import Gate, Kind, NormSpec, family_name

__all__ = ["FAMILIES", "family_spec"]


def family_spec(family: str, usual: NormSpec) -> NormSpec:
    """Return the spec of a family's norm, which must be of the kind of ``usual``, and gated if that is.

    Raises:
        ValueError: no such family, or its norm is of another kind.
    """
    name = family_name(family)
    known = sorted(name for name, each in FAMILIES.items() if _form(each) == _form(usual))
    if name in known:
        return FAMILIES[name]
    near = get_close_matches(name, known, n=3)
    advice = f"did you mean {' or '.join(map(repr, near))}?" if near else f"pass spec=, or one of: {_some(known)}"
    if name in FAMILIES:
        asked, found = _form(usual), _form(FAMILIES[name])
        raise ValueError(f"the norm of {family!r} is of kind '{found}', asked for '{asked}'; {advice}")
    raise ValueError(f"no family {family!r} is known here; {advice}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more of normwise.layers.FAMILIES" if names[12:] else "")


def _form(spec: NormSpec) -> str:
    kind = Kind.RMS if spec.kind is Kind.OTHER and not spec.center else spec.kind  # "pocket-tts"
    return f"{'gated ' * (spec.gate is not Gate.NONE)}{kind}"
