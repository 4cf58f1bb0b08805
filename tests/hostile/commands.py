"""The command line run in this process, and what a folder holds before and after."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

__all__ = ["contents", "run", "run_all"]


def run(arguments: Sequence[str], folder: str | None = None) -> dict[str, Any]:
    """Run ``normwise ARGUMENTS`` in a folder."""
    from normwise.cli import main

    if folder is not None:
        os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(list(arguments))
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def run_all(commands: Sequence[Sequence[str]], folder: str) -> list[dict[str, Any]]:
    """Run several commands, one after the other."""
    return [run(each, folder) for each in commands]


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Return every entry below a folder with its size, its time of change and the digest of what it holds."""
    found: dict[str, tuple[int, int, str]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        small = path.is_file() and not path.is_symlink() and status.st_blocks * 512 < 1 << 26
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if small and status.st_size < 1 << 26 else ""
        found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns, digest)
    return found
