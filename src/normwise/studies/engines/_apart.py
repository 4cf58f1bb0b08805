"""Sends what runs a trial to another process without the package around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["apart"]


def apart(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that does the same from an order as a dict to an answer as a dict.

    It is pickled by value, as every nested function, and reads the file of ``function`` by itself: an import of the
    package would load torch, seconds and 300 MB, into a process that only waits for another.
    """
    module, name = function.__module__, function.__name__

    def run(order: dict[str, Any], *stop: Callable[[], bool]) -> dict[str, Any]:
        import sys
        from dataclasses import asdict
        from importlib import import_module
        from importlib.util import module_from_spec, spec_from_file_location
        from pathlib import Path
        from threading import get_ident

        package, *path = module.split(".")
        known_as = f"{package}_apart_{get_ident()}"  # threads do not see each other's, half loaded
        if known_as not in sys.modules:
            file = Path(import_module(package).__path__[0], *path).with_suffix(".py")
            spec = spec_from_file_location(known_as, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[known_as] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[known_as])
        there = sys.modules[known_as]
        return asdict(getattr(there, name)(there.Order(**order), *stop))

    return run
