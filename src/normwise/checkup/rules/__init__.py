"""The rules. Each is one module: its docstring is its page, its file name its name.

To add one, write the module (CONTRIBUTING: "a rule") and import it below.
"""

from __future__ import annotations

from types import ModuleType

from normwise._parts import collect

__all__ = ["all_rules"]

_NEEDS = ("CODE", "SEVERITY", "check", "bad", "good")


def all_rules() -> dict[str, ModuleType]:
    """Return every rule by its kebab-case name, in the order of the codes."""
    found = collect(globals(), needs=_NEEDS)
    return dict(sorted(found.items(), key=lambda item: item[1].CODE))
