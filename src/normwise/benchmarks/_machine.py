"""The machine a benchmark runs on, as far as it decides the figures."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from normwise.kernels import cpu

__all__ = ["Machine", "cpus", "describe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it ran.

    Args:
        cpu: model of the processor.
        cpus: that this process may use.
        isa: vector instructions that torch chose here.
        instructions: those that our compiled kernel chose, None where it does not run.
        device: cpu, or the model of the accelerator.
        load: processes that wanted a CPU in the minute before, None where the system does not say.
        system: operating system and architecture.
        python: its version.
        torch: its version.
        normwise: its version.
    """

    cpu: str
    cpus: int
    isa: str
    instructions: str | None
    device: str
    load: float | None
    system: str
    python: str
    torch: str
    normwise: str


def describe(device: str = "cpu") -> Machine:
    """Describe this machine and what is installed on it."""
    return Machine(
        cpu=_cpu(),
        cpus=cpus(),
        isa=torch.backends.cpu.get_cpu_capability(),
        instructions=cpu.instructions() if cpu.unavailable() is None else None,
        device=torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        normwise=version("normwise"),
    )


def cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    """Return the model of the processor; only Linux knows it better than ``platform`` does."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
