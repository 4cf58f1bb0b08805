"""Theory: what placements and initialisations predict, and what training needs to know of the norms.

Parts load when they are first used: what examines models reads predictions without loading blocks of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normwise._parts import lazy

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
__getattr__, __dir__ = lazy(globals(), _HOMES)
