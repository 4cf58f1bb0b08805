"""A trap of torch itself: a pre-norm nn.TransformerEncoder has no final norm unless you pass one.

Run it: ``python examples/find_missing_final_norm.py``.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

import normwise as nw

WIDTH, WORDS = 64, 100


def language_model(final_norm: nn.Module | None) -> nn.Module:
    """Return embedding, four pre-norm layers, head."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, norm=final_norm, enable_nested_tensor=False)
    parts = {"tokens": nn.Embedding(WORDS, WIDTH), "encoder": encoder, "head": nn.Linear(WIDTH, WORDS)}
    return nn.Sequential(OrderedDict(parts))


def main() -> None:
    """Check the model as most people write it, then with the fix."""
    ids = torch.randint(WORDS, (2, 12))
    for name, norm in (("as written", None), ("with norm=nn.LayerNorm(64)", nn.LayerNorm(WIDTH))):
        report = nw.check(language_model(norm), ids, select=["missing-final-norm"])
        stack = report.placement.stacks[0]
        print(f"{name}: {stack.kind}-norm, {stack.depth} blocks, final norm: {stack.final_norm}")
        for finding in report.findings:
            print(f"  {finding.code} {finding.message}")
            print(f"  fix: {finding.fix}")


if __name__ == "__main__":
    main()
