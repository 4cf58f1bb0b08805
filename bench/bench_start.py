"""How long the command line takes to start, and to check the built-in demo: medians over fresh processes.

Columns: seconds (median, lowest, highest). A bare interpreter and `import torch` stand beside it: the first is
the floor of everything, the second the floor of every check.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

REPEATS = 7

CASES = {
    "bare interpreter": ["-c", "pass"],
    "import normwise": ["-c", "import normwise"],
    "normwise --help": ["-m", "normwise", "--help"],
    "import torch": ["-c", "import torch"],
    "normwise rules": ["-m", "normwise", "rules"],
    "normwise check (demo)": ["-m", "normwise", "check", "--fail-on", "never"],
}


def seconds(arguments: list[str]) -> float:
    """Return the wall time of one fresh interpreter."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print the table; the cases take turns, so that a busy moment hits all of them."""
    print(f"Python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} CPUs, {REPEATS} repeats")
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(REPEATS):
        for name, arguments in CASES.items():
            times[name].append(seconds(arguments))
    for name, values in times.items():
        print(f"{name:24} {statistics.median(values):7.3f} s  ({min(values):.3f} - {max(values):.3f})")


if __name__ == "__main__":
    main()
