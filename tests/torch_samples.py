"""The samples torch tests itself on, without what importing them does to everybody else's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import settings

__all__ = ["functions", "modules"]


@contextmanager
def left_as_it_was() -> Iterator[None]:
    """Undo what ``torch.testing._internal`` does when imported.

    It loads a Hypothesis profile of 10 examples, and forbids setting flags of ``torch.backends``.
    """
    profile, frozen = settings.get_current_profile_name(), torch.backends.flags_frozen()
    yield
    settings.load_profile(profile)
    if not frozen:
        # torch.backends has a function to forbid and none to allow, and is not the module that holds the flag.
        torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True


def modules() -> dict[str, Any]:
    """Return torch's descriptions of its modules by class name; the import takes 2 seconds."""
    with left_as_it_was():
        from torch.testing._internal.common_modules import module_db
    return {info.module_cls.__name__: info for info in module_db}


def functions() -> dict[str, Any]:
    """Return torch's descriptions of its functions by name, variants left out; the import takes 2 seconds."""
    with left_as_it_was():
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.name: op for op in op_db if not op.variant_test_name}
