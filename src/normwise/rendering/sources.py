"""How a report names a file of code, and which file of the checkout a name means.

A link beside the wrong file is worse than none: a file that is not of the checkout is marked, so that its name is
never taken for that of a file of the checkout.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

__all__ = ["FOREIGN", "checkout", "located", "named"]

FOREIGN = "…/"  # what stands before it is another's: an environment, or a folder elsewhere
_INSTALLED = tuple(
    sorted({os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}, key=len, reverse=True)
)
_SUBMODULE = "/modules/"  # in the ``.git`` file of a submodule, which is checked out with the repository around it


def checkout() -> str:
    """Return the root of the repository that the current folder lies in, or that folder where it lies in none.

    Services that annotate files count from there: https://docs.github.com, "SARIF support for code scanning",
    "Specifying the root for source files".
    """
    here = os.path.realpath(os.getcwd())
    return next((str(each) for each in (Path(here), *Path(here).parents) if _is_root(each / ".git")), here)


def named(filename: str) -> str:
    """Return how a report names a file of code, so that the name means the same on another machine.

    A file of the checkout goes by its path from the current folder, any other by ``FOREIGN`` and its path from its
    package on, or from its folder on where it is in no package.

    Args:
        filename: as Python gives it (``code.co_filename``).
    """
    path = os.path.realpath(filename)
    for folder in _INSTALLED:
        if _below(path, folder):
            return FOREIGN + os.path.relpath(path, folder).replace(os.sep, "/")
    if _below(path, checkout()):
        return os.path.relpath(path, os.path.realpath(os.getcwd())).replace(os.sep, "/")
    folder = os.path.dirname(path)
    while os.path.isfile(os.path.join(os.path.dirname(folder), "__init__.py")):
        folder = os.path.dirname(folder)
    return FOREIGN + os.path.relpath(path, os.path.dirname(folder)).replace(os.sep, "/")


def located(name: str) -> str | None:
    """Return the path from the root of the checkout, with forward slashes, None where there is no such file of it.

    Args:
        name: a path from the current folder, or what ``named`` gave.
    """
    root = checkout()
    try:
        path = os.path.realpath(name)
        ours = not name.startswith(FOREIGN) and _below(path, root) and os.path.isfile(path)
        return os.path.relpath(path, root).replace(os.sep, "/") if ours else None
    except (OSError, ValueError):  # what no path can be: a NUL, a lone surrogate
        return None


def _is_root(git: Path) -> bool:
    """Whether an entry ``.git`` is that of a repository: a folder, or the file of a work tree."""
    if os.path.isdir(git):
        return True
    try:
        return os.path.isfile(git) and _SUBMODULE not in git.read_text("utf-8", errors="replace").replace("\\", "/")
    except OSError:
        return False


def _below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)
