"""The ranks of a process group: forks of one fresh process, so that torch is imported once for all of them.

``python -m tests.ranks MODULE WORLD FOLDER [WHAT ...]`` calls ``main(rank, world, folder, *WHAT)`` of the module on
each rank. What a rank prints is in ``FOLDER/log-RANK``, what it has to say in ``FOLDER/rank-RANK.pt``.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def run(module: str, world: int, folder: Path, *what: str, limit: float) -> list[Any]:
    """Return what each rank saved; a failure with what they printed, if one fails or all take more than ``limit`` s."""
    command = [sys.executable, "-m", "tests.ranks", module, str(world), str(folder), *what]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    code: int | None = None
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if code is None and os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    logs = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("log-*")))
    assert code == 0, f"ended with {code} (None: not within {limit} s)\n{logs}"
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(world)]


def _rank(module: str, rank: int, world: int, folder: Path, what: tuple[str, ...]) -> None:
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    importlib.import_module(module).main(rank, world, folder, *what)


def _start(module: str, world: int, folder: Path, *what: str) -> int:
    importlib.import_module(module)
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    ranks = [context.Process(target=_rank, args=(module, rank, world, folder, what)) for rank in range(world)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return int(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    sys.exit(_start(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
