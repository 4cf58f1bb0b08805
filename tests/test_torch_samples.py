"""Looking at torch's samples changes nothing for the tests that run after."""

from __future__ import annotations

import torch
from hypothesis import settings

from tests.torch_samples import functions, modules


def test_the_import_leaves_hypothesis_and_the_flags_of_torch_alone() -> None:
    before = settings().max_examples, torch.backends.flags_frozen()
    assert "LayerNorm" in modules()
    assert "native_layer_norm" in functions()
    assert (settings().max_examples, torch.backends.flags_frozen()) == before == (50, False)
