"""A process that has imported everything once and then does each order in a fork of itself.

A command of normwise takes seconds to import torch and transformers, and milliseconds to refuse a broken file. A fork
of a process that has imported them is a process of its own: its memory and processor time are measured apart, it can
be killed, and whatever it breaks dies with it.

An order is a function of ``tests.hostile`` by name with arguments that JSON can hold; the answer is what it returns,
and what the process cost.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Answer", "Warm"]

ROOT = Path(__file__).parents[2]
_IMPORTS = (
    "normwise.cli", "normwise.checkup.baseline", "normwise.checkup.reports", "normwise.studies",
    "normwise.conversions.saving.running", "normwise.targets.onnx_graph", "transformers.models.llama.modeling_llama",
    "tests.hostile.writers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """What a function returned in its process, None if the process ended before; and what the process cost."""

    value: Any
    status: int  # exit code, or minus the signal that ended it
    seconds: float  # of the processor, children included
    megabytes: float  # at most, above what the process began with


class Warm:
    """The process that forks; a context manager."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.hostile.warm"], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        if self._from.readline() != "ready\n":
            raise RuntimeError("the warm process did not start")

    def do(self, function: str, *arguments: Any, limit: float = 120.0) -> Answer:
        """Call ``module:function`` of ``tests.hostile`` in a fork that is killed after ``limit`` seconds."""
        self._to.write(json.dumps([function, arguments, limit]) + "\n")
        self._to.flush()
        return Answer(**json.loads(self._from.readline()))

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *error: object) -> None:
        self._to.close()
        self._process.wait()
        self._from.close()


def _serve() -> None:
    for name in _IMPORTS:
        importlib.import_module(name)
    answers = os.dup(1)
    os.dup2(2, 1)  # what is printed is no answer
    os.write(answers, b"ready\n")
    for line in sys.stdin:
        os.write(answers, json.dumps(_forked(*json.loads(line))).encode() + b"\n")


def _forked(function: str, arguments: list[Any], limit: float) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _child(function, arguments, limit, write)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    _, status, used = os.wait4(child, 0)
    value, begun = json.loads(said) if said else (None, 0)
    return {
        "value": value,
        "status": os.waitstatus_to_exitcode(status),
        "seconds": used.ru_utime + used.ru_stime,
        "megabytes": max(used.ru_maxrss - begun, 0) / 1024,
    }


def _child(function: str, arguments: list[Any], limit: float, write: int) -> None:
    signal.alarm(max(1, round(limit)))  # its default action ends the process
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(f"tests.hostile.{module}"), name)(*arguments)
        with open(write, "wb") as pipe:
            pipe.write(json.dumps([value, begun]).encode())
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(70)
    os._exit(0)


if __name__ == "__main__":
    _serve()
