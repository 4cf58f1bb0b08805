"""An importable module and a callable in it: package.module:callable.

The callable takes no arguments and returns what a FILE.py:callable returns. The current folder is
importable while the module loads, as with ``python -m``; no bytecode is written.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

from normwise.errors import TargetError
from normwise.targets import python_file, user_code
from normwise.targets.target import Target

__all__ = ["EXAMPLE", "claims", "load"]

EXAMPLE = "package.module:build"
_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def claims(text: str) -> bool:
    """Tell whether the text is ``package.module:callable``."""
    return bool(_FORM.fullmatch(text)) and not text.startswith(python_file.PREFIXES) and not python_file.claims(text)


def load(text: str, *, inputs: str | None = None) -> Target:
    """Import the module and build the target.

    Args:
        text: ``package.module:callable``.
        inputs: not needed here; the callable may give its own.

    Raises:
        TargetError: the module is missing or cannot be imported, or the callable does not give a target.
    """
    del inputs
    name, _, attribute = text.partition(":")
    with user_code.running_in(Path.cwd()):
        return user_code.build(_import(name, text), attribute, text=text)


def _import(name: str, text: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(
                f"{text}: there is no module {error.name!r} here; install it, run where it can be imported, "
                f"or give a file ({python_file.EXAMPLE})"
            ) from error
        raise TargetError(f"{text}: importing the module failed at {user_code.blame(error)}") from error
