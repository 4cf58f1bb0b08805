"""A large model without weights is checked on inputs of numbers: nothing copies what has no storage."""

from __future__ import annotations

import os
import subprocess
import sys

_CHECK = """
import torch, normwise as nw
from normwise.targets.hf_build import build_fake
from transformers import LlamaConfig
config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=50)
for dtype in (torch.float32, torch.bfloat16):
    report = nw.check(build_fake(config), {"inputs_embeds": torch.randn(2, 13, 64).to(dtype)}, effort="read")
    assert len(report.norms) == 5
    assert any("cannot be cast" in row.why for row in report.not_checked)
"""


def test_a_model_without_storage_is_checked() -> None:
    """In a process of its own, in which the heap is looked at: what is broken here ends it."""
    debug = "/lib/x86_64-linux-gnu/libc_malloc_debug.so.0"
    watched = {"LD_PRELOAD": debug, "MALLOC_CHECK_": "3"} if os.path.exists(debug) else {}
    command = [sys.executable, "-W", "ignore", "-c", _CHECK]
    done = subprocess.run(command, env={**os.environ, **watched}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-800:]
