"""Everything of normwise that writes a file, killed at random points and run on full disks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.file_limit import file_limit
from tests.hostile.commands import run

__all__ = ["COMMANDS", "KILLED", "filled", "killed"]

_REPORTS = ("txt", "json", "html", "md", "sarif", "xml")
_EXPORTS = ("html", "md", "txt", "json", "jsonl", "csv", "parquet")
KILLED = (*(f"report.{kind}" for kind in _REPORTS), "baseline.json", *(f"export.{kind}" for kind in _EXPORTS))
_TEMPORARY = ".normwise-"

_CHECK = ("check", "demo:faulty-decoder", "--effort", "read", "--fail-on", "never")
COMMANDS: dict[str, tuple[str, ...]] = {
    **{f"report.{kind}": (*_CHECK, "-o", "OUT") for kind in _REPORTS},
    "baseline.json": (*_CHECK, "--baseline", "OUT", "--write-baseline"),
    "model.safetensors": ("convert", "swap-layers", "demo:faulty-decoder", "-o", "OUT", "--force", "--no-verify"),
    **{f"export.{kind}": ("study", "show", "LEDGER", "-o", "OUT") for kind in _EXPORTS},
}
"""Commands by the file that they write at OUT."""


def _writer(name: str) -> Callable[[Path, str], object]:
    """Return what writes a file whose content depends on a word."""
    if name.startswith("export"):
        from normwise.studies import reports as exports
        from tests.studies.made_up import evidence

        return lambda path, word: exports.save(evidence(study=f"study-{word}"), path)
    import normwise as nw
    from normwise.checkup import baseline, reports

    report = nw.check("demo:faulty-decoder", effort="read")
    if name.startswith("baseline"):
        return lambda path, word: baseline.Baseline(path=path).updated(replace(report, target=word)).write()
    return lambda path, word: reports.save(replace(report, target=word), path)


def killed(name: str, folder: str, times: int, seed: int) -> dict[str, Any]:
    """Rewrite a file without end, and kill that at random points; return how the file was found each time."""
    place, chance = Path(folder), random.Random(seed)
    write, path = _writer(name), place / name
    whole = set()
    for word in ("old", "new"):
        began = time.perf_counter()
        write(path, word)
        lasts = time.perf_counter() - began
        whole.add(path.read_bytes())
    found: dict[str, Any] = {"whole": 0, "torn": 0, "left": 0}
    for _ in range(times):
        child = _rewriting(write, path)
        time.sleep(chance.uniform(0, 3 * lasts))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found["whole" if path.read_bytes() in whole else "torn"] += 1
        found["left"] += any(each.startswith(_TEMPORARY) for each in os.listdir(place))
    write(path, "old")
    found["files"] = sorted(os.listdir(place))
    found["contents"] = len(whole)
    return found


def _rewriting(write: Callable[[Path, str], object], path: Path) -> int:
    """Start a process that writes one content after the other, and return once it has begun."""
    read, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun, b"!")
        while True:
            for word in ("new", "old"):
                write(path, word)
    os.read(read, 1)
    os.close(read)
    os.close(begun)
    return child


def filled(name: str, folder: str, most: int | None) -> dict[str, Any]:
    """Run the command that writes a file where it cannot be written whole.

    Args:
        name: of the file.
        folder: where it lies, and nothing else.
        most: bytes a file may have; None: the disk is full.
    """
    place = Path(folder)
    path = place / name
    old = _OLD_BASELINE if name.startswith("baseline") else b"old"
    path.write_bytes(old)
    if most is None:
        _fill(place)
    ledger = str(Path(__file__).parents[2] / "docs" / "studies" / "data" / "batch-size.jsonl")
    words = {"OUT": str(path), "LEDGER": ledger}
    with nullcontext() if most is None else file_limit(most):
        answer = run([words.get(word, word) for word in COMMANDS[name]])
    files = {each.name: each.read_bytes() for each in place.iterdir() if each.name != _FILLER}
    return {**answer, "out": "", "old": files.pop(name, b"") == old, "others": sorted(files)}


_FILLER = "filler"
_OLD_BASELINE = b'{"kind": "normwise-baseline", "schema": 1, "findings": []}'


def _fill(place: Path) -> None:
    """Leave less than a page of a disk."""
    with (place / _FILLER).open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(b"\0" * 1024)
