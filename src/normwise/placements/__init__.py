"""Placements: where norms sit on the residual stream, one file each, as data.

A placement is one file with a docstring (its page), ``NEEDS_FINAL_NORM``, ``INIT`` (the initialisation that its gains
multiply) and ``wire(layer, stack, sublayer) -> Wiring``; where it has them, ``ALIASES``, ``STREAMS`` and
``gains(layer, stack, sublayer)``. Embedding norm, final norm and QK norm are options of any placement.
"""

from __future__ import annotations

from normwise._parts import collect
from normwise.placements import admin as admin
from normwise.placements import b2t as b2t
from normwise.placements import deep_norm as deep_norm
from normwise.placements import ds_init as ds_init
from normwise.placements import hybrid_norm as hybrid_norm
from normwise.placements import keel as keel
from normwise.placements import layernorm_scaling as layernorm_scaling
from normwise.placements import layerscale as layerscale
from normwise.placements import mix_ln as mix_ln
from normwise.placements import none as none
from normwise.placements import normformer as normformer
from normwise.placements import parallel as parallel
from normwise.placements import parallel_shared as parallel_shared
from normwise.placements import post as post
from normwise.placements import pre as pre
from normwise.placements import res_post as res_post
from normwise.placements import residual as residual
from normwise.placements import residual_multiplier as residual_multiplier
from normwise.placements import rezero as rezero
from normwise.placements import sandwich as sandwich
from normwise.placements import skip_init as skip_init
from normwise.placements import sub_ln as sub_ln
from normwise.placements import t_fixup as t_fixup
from normwise.placements._asked import advice, kebab
from normwise.placements._placement import SUBLAYERS as SUBLAYERS
from normwise.placements._placement import Placement as Placement

__all__ = ["SUBLAYERS", "Placement", "get", "names"]

_PLACEMENTS = {
    name: Placement(name, part) for name, part in collect(globals(), needs=("NEEDS_FINAL_NORM", "INIT", "wire")).items()
}
_ALIASES = {alias: name for name, placement in _PLACEMENTS.items() for alias in placement.aliases}


def names() -> tuple[str, ...]:
    """Return the canonical names, in alphabetical order."""
    return tuple(_PLACEMENTS)


def get(name: str) -> Placement:
    """Return a placement by its name or an alias; underscores are hyphens.

    Raises:
        ValueError: no such placement; near names are listed.

    Examples:
        >>> get("deep-norm").wire(0, 24).skip_scale
        2.6321480259049848
        >>> get("peri_ln").name
        'sandwich'
    """
    asked = kebab(name)
    found = _PLACEMENTS.get(_ALIASES.get(asked, asked))
    if found is None:
        raise ValueError(f"no placement is called {name!r}; {advice(name, [*_PLACEMENTS, *_ALIASES], _PLACEMENTS)}")
    return found
