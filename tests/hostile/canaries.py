"""What opens payloads: pickle itself as a control, and everything of normwise that takes a file."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile import safetensors_files
from tests.hostile.commands import run
from tests.hostile.config_files import GOOD
from tests.hostile.payloads import PAYLOADS, in_tar, in_zip
from tests.hostile.pt2_files import with_examples

__all__ = ["ENTRIES", "SHAPES", "attacked", "unpickled"]

SHAPES: dict[str, Callable[[bytes], bytes]] = {"raw": bytes, "zip": in_zip, "tar": in_tar}
_SUFFIXES = (
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".pkl",
    ".safetensors",
    ".onnx",
    ".pt2",
    ".json",
    ".jsonl",
    ".sqlite",
    ".parquet",
)
_IN_FOLDERS = (
    "pytorch_model.bin",
    "training_args.bin",
    "tokenizer.pkl",
    "optimizer.pt",
    "model.safetensors",
    "adapter_model.bin",
)


def _command(*words: str) -> Callable[[Path, bytes], Any]:
    """Give a file to a command in the place of ``FILE``."""

    def enter(folder: Path, content: bytes) -> Any:
        given = [word.replace("FILE", str(_put(folder / f"model{word.rpartition('FILE')[2]}", content)))
                 if "FILE" in word else word for word in words]  # fmt: skip
        return run(given, str(folder))["code"]

    return enter


def _folder(form: str, name: str) -> Callable[[Path, bytes], Any]:
    def enter(folder: Path, content: bytes) -> Any:
        held = folder / "held"
        held.mkdir()
        _put(held / "config.json", GOOD)
        _put(held / name, content)
        return run(["check", form.replace("DIR", str(held)), "--isolated", "--effort", "read"], str(folder))["code"]

    return enter


def _indexed(form: str) -> Callable[[Path, bytes], Any]:
    """A folder whose index leads to the payload, beside a file that makes it one of safetensors."""

    def enter(folder: Path, content: bytes) -> Any:
        _put(folder / "other.safetensors", safetensors_files.file(safetensors_files.header(safetensors_files.GOOD)))
        index = {"metadata": {}, "weight_map": dict.fromkeys(safetensors_files.GOOD, "pytorch_model.bin")}
        _put(folder / "model.safetensors.index.json", json.dumps(index).encode())
        _put(folder / "config.json", GOOD)
        _put(folder / "pytorch_model.bin", content)
        return run(["check", form.replace("DIR", str(folder)), "--isolated"], str(folder))["code"]

    return enter


def _exampled(folder: Path, content: bytes) -> Any:
    path = _put(folder / "model.pt2", with_examples(content))
    return run(["check", str(path), "--isolated", "--effort", "read"], str(folder))["code"]


def _library(call: str) -> Callable[[Path, bytes], Any]:
    def enter(folder: Path, content: bytes) -> Any:
        import normwise
        from normwise import targets
        from normwise.targets import checkpoint

        functions: dict[str, Callable[[str], Any]] = {
            "nw.check": normwise.check, "nw.load": normwise.load, "targets.load": targets.load,
            "checkpoint.read": checkpoint.read,
        }  # fmt: skip
        name, _, suffix = call.partition(" ")
        try:
            functions[name](str(_put(folder / f"model{suffix}", content)))
        except Exception as error:
            return type(error).__name__
        return "read"

    return enter


def _put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


ENTRIES: dict[str, Callable[[Path, bytes], Any]] = {
    **{f"check FILE{suffix}": _command("check", f"FILE{suffix}", "--isolated") for suffix in _SUFFIXES},
    **{f"check {form} with {name}": _folder(form, name) for form in ("DIR", "hf:DIR") for name in _IN_FOLDERS},
    **{f"check {form}, its index": _indexed(form) for form in ("DIR", "hf:DIR")},
    "check FILE.pt2 with example inputs": _exampled,
    "map FILE.pt": _command("map", "FILE.pt"),
    "convert FILE.pt": _command("convert", "rms-norm", "FILE.pt", "-o", "out"),
    "convert plan FILE.bin": _command("convert", "plan", "FILE.bin"),
    "convert verify FILE.pt": _command("convert", "verify", "FILE.pt", "FILE.bin"),
    "convert verify FILE.safetensors": _command("convert", "verify", "FILE.safetensors", "demo:faulty-decoder"),
    "study show FILE.sqlite": _command("study", "show", "FILE.sqlite"),
    "study show FILE.jsonl": _command("study", "show", "FILE.jsonl"),
    "study resume FILE.sqlite": _command("study", "resume", "FILE.sqlite"),
    "--baseline FILE.json": _command("check", "demo:faulty-decoder", "--effort", "read", "--baseline", "FILE.json"),
    "--config FILE.toml": _command("check", "demo:faulty-decoder", "--effort", "read", "--config", "FILE.toml"),
    **{f"{call} FILE{suffix}": _library(f"{call} {suffix}")
       for call in ("nw.check", "nw.load", "targets.load", "checkpoint.read") for suffix in (".pt", ".safetensors")},
}  # fmt: skip


def unpickled(payload: str, canary: str) -> None:
    """Open a payload as nobody should."""
    with contextlib.suppress(Exception):
        pickle.loads(PAYLOADS[payload](canary))


def attacked(payload: str, entries: list[str], shapes: list[str], folder: str) -> dict[str, Any]:
    """Put a payload through some entries in some shapes; return what each answered, and those that ran it."""
    answers, ran = {}, []
    for entry in entries:
        for shape in shapes:
            place = Path(folder) / "place"
            place.mkdir()
            canary = Path(folder) / "canary"
            os.chdir(place)
            answers[f"{entry}, {shape}"] = ENTRIES[entry](place, SHAPES[shape](PAYLOADS[payload](str(canary))))
            os.chdir(folder)
            shutil.rmtree(place)
            if os.listdir(folder):
                ran.append(f"{payload} by {entry}, {shape}")
                for left in Path(folder).iterdir():
                    left.unlink()
    return {"answers": answers, "ran": ran}
