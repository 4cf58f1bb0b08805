"""Twenty-odd folders whose config.json has one defect, for DIR (its weights are read) and hf:DIR (it is built)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hostile import safetensors_files

__all__ = ["CASES", "GOOD", "LLAMA", "ConfigCase"]

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConfigCase:
    """A folder with a config.json, and beside it one sound norm in a safetensors file where ``weights``.

    ``word`` is what the refusal of DIR has to say, ``word_hf`` that of hf:DIR; empty where it is read.
    """

    defect: str
    word: str
    word_hf: str
    content: bytes | None
    other: Callable[[Path], object] | None = None

    def make(self, folder: Path, *, weights: bool) -> None:
        """Fill a folder."""
        if weights:
            (folder / "model.safetensors").write_bytes(safetensors_files.file(safetensors_files.header(_HELD)))
        if self.content is not None:
            (folder / "config.json").write_bytes(self.content)
        if self.other is not None:
            self.other(folder)


_HELD = safetensors_files.GOOD


def _llama(**fields: Any) -> bytes:
    return json.dumps({**LLAMA, **fields}).encode()


GOOD = _llama()


def _link(folder: Path) -> None:
    (folder / "config.json").symlink_to("config.json")


CASES = [
    ConfigCase("empty", "JSON", "JSON", b""),
    ConfigCase("a page of HTML", "JSON", "JSON", b"<html>404</html>"),
    ConfigCase("cut", "JSON", "JSON", _llama()[:40]),
    ConfigCase("a list", "no JSON object", "JSON object", b"[]"),
    ConfigCase("a number", "no JSON object", "JSON object", b"7"),
    ConfigCase("UTF-16", "JSON", "JSON", json.dumps(LLAMA).encode("utf-16")),
    ConfigCase("bytes that are no text", "JSON", "JSON", b'{"model_type": "\xff\xfe"}'),
    ConfigCase("a name twice", "twice", "twice", _llama()[:-1] + b', "hidden_size": 32}'),
    ConfigCase("brackets 100,000 deep", "nested", "nested", b'{"a":' + b"[" * 100_000),
    ConfigCase("11 MB", "limit", "limit", _llama(note="x" * 11_000_000)),
    ConfigCase("a number of 10,000 digits", "JSON", "JSON", b'{"model_type": "llama", "a": ' + b"9" * 10_000 + b"}"),
    ConfigCase("NaN for an eps", "", "eps=nan", _llama(rms_norm_eps=float("nan"))),
    ConfigCase("a folder called config.json", "no regular file", "config.json", None,
     lambda f: (f / "config.json").mkdir()),
    ConfigCase("a link to itself", "", "config.json", None, _link),
    ConfigCase("an unknown type", "", "zzz", _llama(model_type="zzz")),
    ConfigCase("a list for a type", "", "model_type", _llama(model_type=["llama"])),
    ConfigCase("no type", "", "model_type", b'{"hidden_size": 16}'),
    ConfigCase("code of its own", "", "auto_map", _llama(model_type="zzz", auto_map={"AutoModel": "evil.Model"})),
    ConfigCase("a type with markup and escape sequences", "", "␛", _llama(model_type="<script>\x1b[2J")),
    ConfigCase("a negative width", "", "negative", _llama(hidden_size=-16)),
    ConfigCase("a text for a width", "", "hidden_size", _llama(hidden_size="__import__('os')")),
    ConfigCase("a width of 10**12", "", "overflow", _llama(hidden_size=10**12)),
    ConfigCase("10**9 layers", "", "num_hidden_layers", _llama(num_hidden_layers=10**9)),
    ConfigCase("10**12 words", "", "", _llama(vocab_size=10**12)),
    ConfigCase("no heads", "", "division", _llama(num_attention_heads=0)),
    ConfigCase("a text for an eps", "", "eps", _llama(rms_norm_eps="small")),
    ConfigCase("1e999 for an eps", "", "eps=inf", GOOD.replace(b"1e-06", b"1e999")),
    ConfigCase("a number of 400 digits for an eps", "", "rms_norm_eps", _llama(rms_norm_eps=10**400)),
    ConfigCase("true for a width", "", "hidden_size", _llama(hidden_size=True)),
    ConfigCase("half of a surrogate pair for a type", "", "ud800", b'{"model_type": "\\ud800"}'),
    ConfigCase("a NUL in a type", "", "␀", _llama(model_type="llama\0")),
    ConfigCase("a path for a type", "", "../../x", _llama(model_type="../../x")),
    ConfigCase("a function of the system for a dtype", "", "os.system", _llama(dtype="os.system")),
    ConfigCase("a rotation of a kind that is code", "", "__import__", _llama(
     rope_parameters={"rope_type": "__import__", "rope_theta": 1e4})),
    ConfigCase("attention from a hub", "", "code from a hub", _llama(attn_implementation="evil/attention")),
    ConfigCase("weights that are a pickle", "", "", _llama(transformers_weights="adapter_model.bin")),
    ConfigCase("a number for architectures", "", "int", _llama(architectures=7)),
    ConfigCase("10**9 labels", "", "num_labels", _llama(num_labels=10**9)),
    ConfigCase("a mask of 60,000 by 60,000", "", "buffers of 3,600,000,000", json.dumps(
     {"model_type": "gpt_neo", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 64,
      "attention_types": [[["global"], 1]], "max_position_embeddings": 60_000}).encode()),
    ConfigCase("images of 20,000 by 20,000", "", "2x3x20000x20000", json.dumps(
     {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
      "intermediate_size": 32, "image_size": 20_000, "patch_size": 400}).encode()),
    ConfigCase("an activation that is code", "", "__import__", _llama(hidden_act="__import__('os')")),
]  # fmt: skip
"""Each through DIR beside weights, and through hf:DIR."""
