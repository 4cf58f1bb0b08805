"""The source of every class of transformers whose name says norm, in a form in which copies are equal."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["norm_sources"]

_CLASS = re.compile(r"^( *)class (\w*norm\w*)\b", re.MULTILINE | re.IGNORECASE)


@cache
def norm_sources() -> dict[str, str]:
    """Return ``folder.Class`` -> source, without its name, decorators, docstrings and annotations."""
    found = find_spec("transformers")
    models = Path(str(found and found.origin)).parent / "models"
    sources: dict[str, str] = {}
    for file in sorted(models.rglob("modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        for match in _CLASS.finditer(text):
            sources[f"{file.parent.name}.{match[2]}"] = _bare(_block(text, match), match[2])
    return sources


def _block(text: str, match: re.Match[str]) -> str:
    """Return the lines from ``class`` up to the first one that is indented no further."""
    end = re.compile(rf"^ {{0,{len(match[1])}}}[^\s)]", re.MULTILINE).search(text, match.end())
    return textwrap.dedent(text[match.start() : end.start() if end else len(text)])


def _bare(source: str, name: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not _is_told_only(each)] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return re.sub(rf"\b{name}\b", "Norm", ast.unparse(tree))


def _is_told_only(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring, or how the module prints itself."""
    if isinstance(node, ast.FunctionDef):
        return node.name == "extra_repr"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
