"""normwise maps every normalization in a PyTorch model and says what is wrong with it.

    import normwise as nw

    report = nw.check(model, inputs)  # the norm map, findings with evidence and a fix
    report = nw.map(model, inputs)    # the map alone

Everything loads when it is first used: ``import normwise`` alone does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normwise import (
        benchmarks,
        blocks,
        checkup,
        conversions,
        errors,
        facts,
        functional,
        graph,
        kernels,
        layers,
        models,
        placements,
        rendering,
        spec,
        studies,
        targets,
        testing,
        theory,
    )
    from normwise.checkup import check, ignore, map
    from normwise.checkup.finding import Basis, Finding, NotChecked, Severity
    from normwise.checkup.report import Report
    from normwise.conversions import accelerate, convert
    from normwise.conversions.saving import load
    from normwise.errors import NormwiseError
    from normwise.spec import NormSpec, Wiring
    from normwise.studies import study
    from normwise.targets.target import Target
    from normwise.theory import param_groups

    __version__: str

__all__ = [
    "Basis",
    "Finding",
    "NormSpec",
    "NormwiseError",
    "NotChecked",
    "Report",
    "Severity",
    "Target",
    "Wiring",
    "__version__",
    "accelerate",
    "benchmarks",
    "blocks",
    "check",
    "checkup",
    "conversions",
    "convert",
    "errors",
    "facts",
    "functional",
    "graph",
    "ignore",
    "kernels",
    "layers",
    "load",
    "map",
    "models",
    "param_groups",
    "placements",
    "rendering",
    "spec",
    "studies",
    "study",
    "targets",
    "testing",
    "theory",
]

_HOMES = {
    "Basis": "normwise.checkup.finding",
    "Finding": "normwise.checkup.finding",
    "NormSpec": "normwise.spec",
    "NormwiseError": "normwise.errors",
    "NotChecked": "normwise.checkup.finding",
    "Report": "normwise.checkup.report",
    "Severity": "normwise.checkup.finding",
    "Target": "normwise.targets.target",
    "Wiring": "normwise.spec",
    "accelerate": "normwise.conversions",
    "check": "normwise.checkup",
    "convert": "normwise.conversions",
    "ignore": "normwise.checkup",
    "load": "normwise.conversions.saving",
    "map": "normwise.checkup",
    "param_groups": "normwise.theory",
    "study": "normwise.studies",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'normwise' has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        value = version("normwise")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        value = import_module(f"normwise.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
