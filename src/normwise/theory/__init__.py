"""Theory: what placements and initialisations predict, and what training needs to know of the norms."""

from __future__ import annotations

from normwise.theory.groups import param_groups as param_groups
from normwise.theory.prediction import Prediction as Prediction
from normwise.theory.prediction import predict as predict
from normwise.theory.schedules import SCHEDULES as SCHEDULES
from normwise.theory.schedules import warm_up as warm_up

__all__ = ["SCHEDULES", "Prediction", "param_groups", "predict", "warm_up"]
