"""A study of two real trainings, small enough to be run on every engine."""

from __future__ import annotations

from typing import Any

ZH = __doc__
VERSION = 1
DATA = ("standard-library",)
SEEDS = 1
CLAIMS = ()
FIGURES = ()


def seconds(params: dict[str, Any]) -> float:
    return 2.0


def trials(quick: bool) -> list[dict[str, Any]]:
    return [{"placement": placement} for placement in ("pre", "post")]


def measure(params: dict[str, Any]) -> dict[str, Any]:
    import torch

    from normwise.models import Decoder
    from normwise.studies import _corpus, _training

    torch.manual_seed(params["seed"])
    model = Decoder(256, 32, 2, 2, placement=params["placement"], norm="layer", positions="learned", context=32)
    found = _training.train(
        model, _corpus.corpus(), rate=1e-3, warm_up_steps=0, steps=5, seed=params["seed"], batch=4, length=32, every=1
    )
    return {"loss": found.losses, "validation": found.validation}
