"""A Python file and a callable in it: FILE.py:callable.

The callable takes no arguments and returns a model, ``(model, inputs)``, a dict of Target fields
(``model``, ``inputs`` and any evidence such as ``optimizer`` or ``checkpoint``) or a Target. A name that
holds a model already serves too. The file is imported under a name of its own; its folder is importable
while it loads; no bytecode is written.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

from normwise.errors import TargetError
from normwise.targets import user_code
from normwise.targets.target import Target

__all__ = ["EXAMPLE", "PREFIXES", "claims", "load"]

EXAMPLE = "model.py:build"
PREFIXES = ("demo:", "hf:", "pkg:", "timm:")  # of other kinds; a file or module is never called so
_COUNT = itertools.count()


def claims(text: str) -> bool:
    """Tell whether the text names a Python file, with or without a callable."""
    return (text.endswith(".py") or ".py:" in text) and not text.startswith(PREFIXES)


def load(text: str, *, inputs: str | None = None) -> Target:
    """Import the file and build the target.

    Args:
        text: ``FILE.py:callable``.
        inputs: not needed here; the callable may give its own.

    Raises:
        TargetError: the file is missing or cannot be imported, or the callable does not give a target.
    """
    del inputs
    head, _, attribute = text.rpartition(":") if ".py:" in text else (text, "", "")
    path = Path(head).expanduser()
    if not path.is_file():
        raise TargetError(f"{text}: there is no file {head}; give FILE.py:callable, for example {EXAMPLE}")
    before = set(sys.modules)
    folder = path.resolve().parent
    with user_code.running_in(folder):
        try:
            return user_code.build(_import(path, text), attribute, text=text) if attribute else _no_name(path, text)
        finally:
            _forget_siblings(folder, before)


def _no_name(path: Path, text: str) -> Target:
    _import(path, text)
    raise TargetError(f"{text} names a file but no callable in it; give {text}:NAME")


def _import(path: Path, text: str) -> ModuleType:
    name = f"_normwise_target_{next(_COUNT)}_{path.stem}"  # never the user's own module name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{text}: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and inspect.getsource look it up here
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        del sys.modules[name]
        raise
    except BaseException as error:  # SystemExit too: scripts call sys.exit()
        del sys.modules[name]
        hint = _as_module(path, text, error) if isinstance(error, ImportError) else ""
        raise TargetError(f"{text}: importing the file failed at {user_code.blame(error)}{hint}") from error
    return module


def _as_module(path: Path, text: str, error: ImportError) -> str:
    """Return how a file is named that needs the package around it, or the current folder; "" where that is no help."""
    path, top = path.resolve(), (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError):
        fits = (each for each in (Path.cwd(), *path.parents) if (each / top).is_dir() or (each / f"{top}.py").is_file())
    else:  # a relative import
        fits = (each for each in path.parents[1:] if "relative import" in str(error))
        fits = (each for each in fits if not (each / "__init__.py").is_file())
    root = next((each for each in fits if path.is_relative_to(each)), None)
    names = () if root is None else path.relative_to(root).with_suffix("").parts
    if not names or not all(map(str.isidentifier, names)):
        return ""
    where = "" if root == Path.cwd() else f" in the folder {root}"
    return f"; give {'.'.join(names)}:{text.rpartition(':')[2] if '.py:' in text else 'NAME'}{where}"


def _forget_siblings(folder: Path, before: set[str]) -> None:
    """Drop the modules beside the file, so that a file of the same name elsewhere is not mistaken for them."""
    if any(Path(entry or ".").resolve() == folder for entry in sys.path[1:]):
        return
    for name in set(sys.modules) - before:
        if _lies_beside(sys.modules[name], folder):
            del sys.modules[name]


def _lies_beside(module: ModuleType, folder: Path) -> bool:
    # By the top name and not by the folder alone: a virtual environment may lie in the user's folder too.
    origin = Path(getattr(module, "__file__", None) or "/").resolve()
    top = module.__name__.partition(".")[0]
    return origin in (folder / f"{top}.py", folder / top) or folder / top in origin.parents
