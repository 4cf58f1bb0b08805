"""Other people's libraries are used offline, silently, from a seed, and leave no trace in the process."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch

__all__ = ["offline"]

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Build models without network and warnings; random states and environment are restored."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(_OFFLINE)  # read when huggingface_hub is imported
    states = random.getstate(), np.random.get_state()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
