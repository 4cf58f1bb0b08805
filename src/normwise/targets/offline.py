"""Other people's libraries are used offline, silently, from a seed, and leave no trace in the process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
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
    states = random.getstate(), np.random.get_state()
    try:
        with _no_hub(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def _no_hub() -> Iterator[None]:
    """Take the hub away from what runs here and from the processes that it starts.

    huggingface_hub reads the variables once, when it is imported. So it is imported before they are set, else the
    process would stay offline for good, and it is told as well, else one that had imported it would be online here.
    """
    found = importlib.util.find_spec("huggingface_hub")
    hub = importlib.import_module("huggingface_hub.constants") if found else None
    told = {name: getattr(hub, name) for name in _OFFLINE if hasattr(hub, name)}
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(_OFFLINE)
    for name in told:
        setattr(hub, name, True)
    try:
        yield
    finally:
        for name, value in told.items():
            setattr(hub, name, value)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
