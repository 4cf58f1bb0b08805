"""Theory: what placements and initialisations predict, and what training needs to know of the norms.

Parts load when they are first used: what examines models reads predictions without loading blocks of ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normwise.theory._moments import ASSUMPTIONS, Prediction
    from normwise.theory.groups import param_groups
    from normwise.theory.prediction import predict
    from normwise.theory.schedules import SCHEDULES, warm_up
    from normwise.theory.traced import predict_traced

__all__ = ["ASSUMPTIONS", "SCHEDULES", "Prediction", "param_groups", "predict", "predict_traced", "warm_up"]

_HOMES = {
    "ASSUMPTIONS": "_moments",
    "Prediction": "_moments",
    "SCHEDULES": "schedules",
    "param_groups": "groups",
    "predict": "prediction",
    "predict_traced": "traced",
    "warm_up": "schedules",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'normwise.theory' has no attribute {name!r}")
    value = getattr(import_module(f"normwise.theory.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
