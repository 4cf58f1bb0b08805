"""One trial, in the process that ``_execute`` starts: an order on standard input, an answer on standard output.

It is run as a file, so that it is at work before the package is imported: whoever started it may be dead by then.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import traceback
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from time import monotonic, process_time
from types import ModuleType
from typing import Any

__all__: list[str] = []

_TAIL = 2000  # characters of a traceback that are kept


def main() -> None:
    """Run the trial that standard input orders."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what a study prints is no part of the answer
    order = json.loads(_line())
    Thread(target=_watch, daemon=True).start()
    sys.path[:] = order["path"]
    answer = json.dumps(_answer(order)).encode()
    while answer:
        answer = answer[os.write(answers, answer) :]
    os._exit(0)


def _line() -> bytes:
    read = b""
    while not read.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            os._exit(1)
        read += more
    return read


def _watch() -> None:
    """End this process, and what it started, once standard input closes: then nobody waits for the answer."""
    while os.read(0, 1):
        pass
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    try:
        study = import_module(order["study"])
        refusal = _refusal(study, order)
        return refusal or _measured(study, order)
    except BaseException as error:
        memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        limit = order["memory_limit"]
        said = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        if memory and limit:
            said = f"more than the memory limit of {limit / 1e6:.0f} MB: {said}"
        conditions = _conditions() | {"printed": traceback.format_exc()[-_TAIL:]}
        return {"outcome": "memory" if memory else "failed", "error": said, "conditions": conditions}


def _refusal(study: ModuleType, order: dict[str, Any]) -> dict[str, Any] | None:
    if order["version"] != study.VERSION:
        said = f"the worker has version {study.VERSION} of the study, the runner has {order['version']}"
        return {"outcome": "version", "error": said}
    if not order["data"]:
        return None
    from normwise.studies._data import digests

    for name, digest in digests(tuple(order["data"])).items():
        if digest != order["data"][name]:
            return {"outcome": "data", "error": f"the worker reads another {name}: {digest}"}
    return None


def _measured(study: ModuleType, order: dict[str, Any]) -> dict[str, Any]:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    _limit(order["memory_limit"])
    wall, cpu = monotonic(), process_time()
    metrics = study.measure(order["params"])
    # The peak is not getrusage's: there Linux counts what the process was before exec, a copy of the runner.
    measured = {"seconds": monotonic() - wall, "cpu_seconds": process_time() - cpu, "peak_bytes": _status("VmHWM")}
    for name, value in metrics.items():
        if not all(isinstance(each, (int, float)) for each in (value if isinstance(value, list) else [value])):
            raise TypeError(f"the metric {name} is no number and no list of numbers")
    return {"outcome": "done", "metrics": metrics, **measured, "conditions": _conditions()}


def _limit(memory: int | None) -> None:
    if memory is None:
        return
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    # Libraries take hundreds of MB of what the system counts; a study is asked about its own.
    limit, most = memory + _status("VmData"), resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = min(limit, sys.maxsize if most == resource.RLIM_INFINITY else most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _status(name: str) -> int:
    """Return what Linux says of this process, in bytes; 0 elsewhere."""
    try:
        return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def _conditions() -> dict[str, Any]:
    return {
        "normwise": version("normwise"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "threads": 1,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
