"""A model made for showing: demo:NAME, or no target at all.

The models are in ``normwise.models.demo``, read top to bottom in one sitting; the faulty one carries
planted faults and is what ``normwise check`` examines when it is given nothing.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import replace

from normwise.errors import TargetError
from normwise.targets.answer import from_answer
from normwise.targets.target import Target, Weights

__all__ = ["DEFAULT", "EXAMPLE", "claims", "load"]

DEFAULT = "demo:faulty-decoder"
EXAMPLE = DEFAULT
_MODELS = "normwise.models.demo"  # by name: targets import no models, ours are examined like anybody's


def claims(text: str) -> bool:
    """Tell whether the text is empty or starts with ``demo:``."""
    return not text or text.startswith("demo:")


def load(text: str, *, inputs: str | None = None) -> Target:
    """Build a demo model.

    Args:
        text: ``demo:NAME`` or the empty string.
        inputs: not needed here; a demo brings its own.

    Raises:
        TargetError: there is no demo of that name.
    """
    del inputs
    text = text or DEFAULT
    name = text.removeprefix("demo:").replace("_", "-")
    demos = importlib.import_module(_MODELS).DEMOS
    if name not in demos:
        near = difflib.get_close_matches(name, demos, n=1)
        guess = f"did you mean demo:{near[0]}? " if near else ""
        raise TargetError(f"{text}: there is no such demo; {guess}the demos are {', '.join(demos)}")
    return replace(from_answer(demos[name](), name=f"demo:{name}"), weights=Weights.RANDOM)
