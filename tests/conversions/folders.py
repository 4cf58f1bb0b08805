"""Small transformers folders with every weight redrawn, and what is asked of them."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normwise.targets.hf_build import quiet

SIZES: dict[str, Any] = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.arange(14).reshape(2, 7) % 61


def built(kind: str) -> nn.Module:
    """Return a small model of a type: tied heads (gpt2), renamed keys (gpt_neox), merged experts (mixtral)."""
    with quiet():
        import transformers as tf

        torch.manual_seed(0)
        attention: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
        match kind:
            case "gpt2":
                model = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SIZES))
            case "gpt_neox":
                model = tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(intermediate_size=32, **attention, **SIZES))
            case "llama":
                model = tf.LlamaForCausalLM(tf.LlamaConfig(intermediate_size=32, **attention, **SIZES))
            case "mixtral":
                experts: dict[str, Any] = {"num_local_experts": 2, "intermediate_size": 32, "num_key_value_heads": 2}
                model = tf.MixtralForCausalLM(tf.MixtralConfig(**experts, **attention, **SIZES))
            case _:
                raise ValueError(kind)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter) + 0.1
        return model.eval()


def saved(kind: str, folder: Path, **options: Any) -> Path:
    """Save a small model with a tokenizer file and a pickle beside it; return the folder."""
    with quiet():
        built(kind).save_pretrained(folder, **options)  # type: ignore[operator]
    (folder / "tokenizer.json").write_text('{"version":  "1.0"}')
    (folder / "training_args.bin").write_bytes(b"a pickle")
    return folder


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def generated(model: nn.Module, **options: Any) -> list[list[int]]:
    """Return greedy continuations."""
    with quiet():
        return model.generate(IDS, do_sample=False, max_new_tokens=8, **options).tolist()  # type: ignore[operator]


def logits(model: nn.Module) -> torch.Tensor:
    """Return the logits in float64."""
    with torch.no_grad():
        return copy.deepcopy(model).double()(IDS).logits
