"""The reference of placements, from their docstrings and their data."""

from __future__ import annotations

import re
from dataclasses import fields

from markup import markdown  # beside this file

from normwise import placements
from normwise.rendering.numbers import number
from normwise.spec import Wiring

__all__ = ["placements_page"]


def placements_page() -> str:
    """Return the reference of placements, from their docstrings and their data."""
    names = placements.names()
    parts = [
        "# Placements",
        "Written from the docstrings by `docs/generate.py`. Which to take, and what each does at initialisation:\n"
        "[how to choose](placements.md). `normwise.placements.get(name)` returns one as data.\n\n"
        "N norm, F sublayer, x residual stream, L layers. Initialisations are those of `normwise.models.INITS`, times\n"
        "the gains of a layer's matrices, where there are any. Wirings are fields of `Wiring`: see\n"
        "[the Python API](python-api.md#nwplacements-nwblocks-nwmodels).",
        " ".join(f"[{name}](#{name})" for name in names),
        *(_placement(placements.get(name)) for name in names),
    ]
    return "\n\n".join(parts) + "\n"


def _placement(each: placements.Placement) -> str:
    body = each.page.partition("References:")
    references = re.sub(
        r"(?:arxiv\.org/abs|aclanthology\.org|proceedings\.mlr\.press|github\.com)/[^\s;,]+",
        lambda found: f"[{found[0]}](https://{found[0]})",
        " ".join(body[2].split()),
    )
    rows = [
        ("also called", ", ".join(f"`{alias}`" for alias in each.aliases)),
        ("norm after the last layer", "needed" if each.needs_final_norm else "not needed"),
        ("residual streams", str(each.streams) if each.streams > 1 else ""),
        ("initialisation", f"`{each.init}`"),
        *((f"layer 12 of 24, {name}", _wiring(each, name)) for name in ("attention", "mlp")),
        ("gains", _gains(each)),
        ("references", references),
    ]
    told = "\n".join(f"| {name} | {value} |" for name, value in rows if value)
    return f"## {each.name}\n\n{markdown(body[0].strip())}\n\n| | |\n|---|---|\n{told}"


def _wiring(each: placements.Placement, sublayer: str) -> str:
    wiring, plain = each.wire(11, 24, sublayer=sublayer), Wiring()
    said = [(field.name, getattr(wiring, field.name)) for field in fields(wiring)]
    return (
        ", ".join(f"`{name}={_short(value)}`" for name, value in said if value != getattr(plain, name)) or "`Wiring()`"
    )


def _gains(each: placements.Placement) -> str:
    gains = {**each.gains(11, 24), **each.gains(11, 24, sublayer="mlp")}
    return ", ".join(f"`{role}` {number(gain)}" for role, gain in gains.items() if gain != 1.0)


def _short(value: object) -> str:
    return number(value) if isinstance(value, float) else repr(value)
