"""normwise maps every normalization in a PyTorch model and says what is wrong with it.

    import normwise as nw

    report = nw.check(model, inputs)  # the norm map, findings with evidence and a fix
    report = nw.map(model, inputs)    # the map alone

Everything loads when it is first used: ``import normwise`` alone does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normwise._parts import lazy

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
    "Basis": "checkup.finding",
    "Finding": "checkup.finding",
    "NormSpec": "spec",
    "NormwiseError": "errors",
    "NotChecked": "checkup.finding",
    "Report": "checkup.report",
    "Severity": "checkup.finding",
    "Target": "targets.target",
    "Wiring": "spec",
    "accelerate": "conversions",
    "check": "checkup",
    "convert": "conversions",
    "ignore": "checkup",
    "load": "conversions.saving",
    "map": "checkup",
    "param_groups": "theory",
    "study": "studies",
}
# What has no home of its own is a package.
_load, __dir__ = lazy(globals(), {name: _HOMES.get(name, "") for name in __all__})


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        return version("normwise")
    return _load(name)
