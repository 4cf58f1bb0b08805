"""Where do the norms of different transformers architectures sit? One line each.

Run it: ``python examples/map_transformers.py [TYPE ...]``. The models are made small from their default
configurations, with random weights; nothing is downloaded. Needs the extra ``hf``.
"""

from __future__ import annotations

import sys

import normwise as nw

TYPES = ("bert", "llama", "olmo2", "gemma2")


def main(types: list[str]) -> None:
    """Print the stack, the ends and the kinds of norm of each type."""
    for name in types or TYPES:
        report = nw.map(f"hf:{name}")
        kinds = ", ".join(sorted({str(site.spec.kind) for site in report.norms if site.spec}))
        for stack in report.placement.stacks:
            ends = f"final norm: {'yes' if stack.final_norm else 'no'}"
            print(f"{name:10} {stack.kind:10} {stack.sublayers:2} adds  {ends:15}  {kinds} ({len(report.norms)} norms)")


if __name__ == "__main__":
    main(sys.argv[1:])
