"""A study that costs nothing: every trial does what its parameters say. Imports neither torch nor normwise."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

ZH = __doc__
VERSION = 1
DATA = ()
SEEDS = 2
CLAIMS = ()
FIGURES = ()


def seconds(params: dict[str, Any]) -> float:
    return 0.1


def trials(quick: bool) -> list[dict[str, Any]]:
    return [{"does": "number", "at": at} for at in range(2 if quick else 4)]


def measure(params: dict[str, Any]) -> dict[str, Any]:
    if "log" in params:
        with Path(params["log"]).open("a") as log:
            log.write(f"{os.getpid()} {params['at']}\n")
    return _DOES[params["does"]](params)


def _number(params: dict[str, Any]) -> dict[str, Any]:
    return {"value": 10.0 * params["at"] + params["seed"]}


def _odd_numbers(params: dict[str, Any]) -> dict[str, Any]:
    return {"nan": float("nan"), "inf": float("inf"), "list": [1, float("-inf"), float("nan"), 0.1 + 0.2]}


def _sleep(params: dict[str, Any]) -> dict[str, Any]:
    time.sleep(params["seconds"])
    return _number(params)


def _raise(params: dict[str, Any]) -> dict[str, Any]:
    raise ArithmeticError(f"trial {params['at']} does not converge")


def _print(params: dict[str, Any]) -> dict[str, Any]:
    print("a study that prints", flush=True)
    os.write(1, b"{}")
    return _number(params)


def _exit(params: dict[str, Any]) -> dict[str, Any]:
    os._exit(3)


def _die(params: dict[str, Any]) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _die_once(params: dict[str, Any]) -> dict[str, Any]:
    """Die like a worker that is killed, but not the second time: the log tells."""
    if len(Path(params["log"]).read_text().splitlines()) == 1:
        _die(params)
    return _number(params)


def _fill(params: dict[str, Any]) -> dict[str, Any]:
    return {"length": len(bytearray(params["bytes"]))}


def _fill_tensor(params: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {"length": torch.zeros(params["bytes"], dtype=torch.uint8).numel()}


def _leave_a_child(params: dict[str, Any]) -> dict[str, Any]:
    child = subprocess.Popen(["sleep", "60"])
    Path(params["child"]).write_text(str(child.pid))
    return _number(params)


def _spin(params: dict[str, Any]) -> dict[str, Any]:
    """Keep the interpreter busy, as a training does."""
    until = time.monotonic() + params["seconds"]
    while time.monotonic() < until:
        pass
    return _number(params)


def _bulk(params: dict[str, Any]) -> dict[str, Any]:
    return {"value": _number(params)["value"], "list": [at + 0.1 for at in range(5000)]}


def _text(params: dict[str, Any]) -> dict[str, Any]:
    return {"value": Path()}


_DOES = {
    "number": _number,
    "odd numbers": _odd_numbers,
    "sleep": _sleep,
    "raise": _raise,
    "print": _print,
    "exit": _exit,
    "die": _die,
    "die once": _die_once,
    "fill": _fill,
    "fill tensor": _fill_tensor,
    "leave a child": _leave_a_child,
    "spin": _spin,
    "bulk": _bulk,
    "text": _text,
}
