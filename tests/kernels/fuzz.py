"""Random calls of the compiled kernels, judged by the definition in float64.

``python tests/kernels/fuzz.py --seconds 60`` runs for a while, also with the sanitizers of ``make sanitize``; the
test beside it runs a short round with fresh memory poisoned. Sizes go from 0 to 70,000, memory is strided, pointers
start at any element, and the number of threads changes: with it nothing else may. One call in 200 is so large that
its output is written past the cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from normwise import kernels
from tests.kernels.fuzz_calls import FAMILIES, LARGE, Call, Draw
from tests.kernels.fuzz_judge import check, refusal

# A large call takes two seconds or more, others a few milliseconds: so a third of the time goes to the others.
LARGE_SHARE = 1 / 200


def drawn(draw: Draw, elements: int, large_share: float = LARGE_SHARE) -> Call:
    """Return a random call on about ``elements`` numbers, or a large one."""
    if draw.maybe(large_share):
        return LARGE[draw.choice(list(LARGE))](draw)
    return FAMILIES[draw.choice(list(FAMILIES))](draw, elements)


def main(arguments: list[str]) -> int:
    """Draw calls until the time is up; print what failed, and how many calls there were of each family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elements", type=int, default=60_000)
    parser.add_argument("--large", type=float, default=LARGE_SHARE, help="the share of large calls")
    options = parser.parse_args(arguments)
    why = kernels.cpu.unavailable()
    if why is not None:
        print(f"the compiled kernel does not run here: {why}")
        return 2
    draw, end = Draw(options.seed), time.monotonic() + options.seconds
    calls, refused, failed, large = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    torch.set_num_threads(1)  # small operations of torch wait for each other where cores are busy
    while time.monotonic() < end:
        call = drawn(draw, options.elements, options.large)
        calls[call.family] += 1
        large[call.family] += call.large
        if refusal(call) is not None:
            refused[call.family] += 1
        elif (wrong := check(call)) is not None:
            failed[call.family] += 1
            print(f"{call}: {wrong}", flush=True)
    for family, count in sorted(calls.items()):
        taken = count - refused[family]
        print(
            f"{family}: {count} drawn, {taken} taken, {refused[family]} refused, {failed[family]} wrong, "
            f"{large[family]} large"
        )
    print(f"{calls.total()} calls on {kernels.cpu.instructions()}, {failed.total()} wrong, seed {options.seed}")
    return 1 if failed or not calls.total() - refused.total() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
