"""Random mutations of sound files, and the readers that have to answer each with their own error or with success."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normwise.errors import CheckpointError, ConfigurationError, NormwiseError, StudyError, TargetError
from tests.hostile import config_files, onnx_files, safetensors_files, torch_files

__all__ = ["FORMATS", "mutated", "run"]

_TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"\0", b"\xff",
    b"18446744073709551616", b"9223372036854775807", b"4294967295", b"\\u0000", b"\\ud800", b'"a":', b"[[[[[[[[", b"{}",
    b"\xff\xff\xff\xff", b"\0\0\0\0\0\0\0\x80", b"PK\x01\x02", b"PK\x05\x06", b"'", b"=", b"\n", b"#",
    b"[tool.normwise]",
)  # fmt: skip


def mutated(content: bytes, chance: random.Random, most: int = 4) -> bytes:
    """Return a content with one to ``most`` changes."""
    made = bytearray(content)
    for _ in range(chance.randint(1, most)):
        at = chance.randrange(len(made) + 1)
        span = slice(at, at + chance.choice((1, 1, 2, 4, 8, 16, 64)))
        match chance.randrange(8):
            case 0 if at < len(made):
                made[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(made):
                made[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            case 2:
                del made[span]
            case 3:
                made[at:at] = made[span]
            case 4:
                made[at:at] = chance.choice(_TOKENS)
            case 5:
                made[span] = chance.choice(_TOKENS)
            case 6:
                other = chance.randrange(len(made) + 1)
                made[span] = made[other : other + chance.randrange(1, 32)]
            case 7 if chance.random() < 0.2:
                del made[at:]
    return bytes(made)


@dataclass(frozen=True, slots=True)
class Format:
    """A sound file, what reads it, and the error with which that may refuse."""

    name: str
    content: Callable[[], bytes]
    read: Callable[[Path], object]
    error: type[NormwiseError] | tuple[type[NormwiseError], ...]
    beside: Callable[[Path], object] = lambda folder: None
    mutate: Callable[[bytes, random.Random], bytes] = mutated


def _checkpoint(path: Path) -> object:
    from normwise.targets import checkpoint

    return checkpoint.read(path)


def _archive(path: Path) -> object:
    """What is looked at before the process that unpickles is started."""
    from normwise.targets.checkpoint.archive import pickle_of
    from normwise.targets.checkpoint.files import File
    from normwise.targets.checkpoint.globals_of import examine

    with File(path) as file:
        return examine(pickle_of(file), str(path))


def _settings(path: Path) -> object:
    from normwise.checkup import configuration

    return configuration.read(path)


def _baseline(path: Path) -> object:
    from normwise.checkup import baseline

    return baseline.read(path)


def _target(path: Path) -> object:
    from normwise import targets

    return targets.load(str(path))


def _folder(path: Path) -> object:
    from normwise import targets

    return targets.load(f"hf:{path.parent}")


def _study(path: Path) -> object:
    from normwise.studies import _runner

    return _runner.show(path)


def _shards(folder: Path) -> None:
    held = safetensors_files.file(safetensors_files.header(safetensors_files.GOOD))
    (folder / "a.safetensors").write_bytes(held)
    (folder / "b.safetensors").write_bytes(held.replace(b"h.0", b"h.1"))


def _shard(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors_files.file(safetensors_files.header(safetensors_files.GOOD)))


def _index() -> bytes:
    names = {f"h.{i}.{what}": f"{'ab'[i]}.safetensors" for i in (0, 1) for what in ("norm.weight", "mlp.weight")}
    return json.dumps({"metadata": {"total_size": 96}, "weight_map": names}).encode()


def _toml() -> bytes:
    return b"""[project]
name = "x"
[tool.normwise]
select = ["PLC", "AXS004"]
ignore = ["PLC002"]
fail-on = "warning"
baseline = "known.json"
[[tool.normwise.per-module-ignores]]
modules = ["*.q_norm", "layers.[0-3].norm"]
rules = ["AXS004"]
reason = "the width is a head's"
"""


def _known() -> bytes:
    row = {"target": "demo", "code": "PLC001", "path": "layers.{0-3}.norm", "fingerprint": "ab12" * 4}
    return json.dumps({"kind": "normwise-baseline", "schema": 1, "findings": [row] * 4}, indent=1).encode()


def _safetensors() -> bytes:
    entries = {"__metadata__": {"format": "pt"}, **safetensors_files.GOOD}
    return safetensors_files.file(safetensors_files.header(entries))


def _pickles(content: bytes, chance: random.Random) -> bytes:
    """Every other time the pickle alone, in an archive that is sound: most changes of an archive end at its checks."""
    if chance.random() < 0.5:
        return mutated(content, chance)
    held = {"h.0.norm.weight": torch_files.Tensor(), "h.0.mlp.weight": torch_files.Tensor((2, 2), (2, 1))}
    return torch_files.archive(mutated(torch_files.pickled(held), chance))


def _ledger() -> bytes:
    data = Path(__file__).parents[2] / "docs" / "studies" / "data" / "batch-size.jsonl"
    return b"\n".join(data.read_bytes().splitlines()[:6]) + b"\n"


FORMATS: dict[str, Format] = {
    "safetensors": Format("model.safetensors", _safetensors, _checkpoint, CheckpointError),
    "index": Format("model.safetensors.index.json", _index, _checkpoint, CheckpointError, beside=_shards),
    "config": Format("config.json", lambda: config_files.GOOD,
     lambda p: _checkpoint(p.parent), CheckpointError, beside=_shard),
    "archive": Format("model.pt", torch_files.good, _archive, CheckpointError, mutate=_pickles),
    "pickle": Format("model.pt", torch_files.good, _checkpoint, CheckpointError, mutate=_pickles),
    "onnx": Format("model.onnx", onnx_files.good, _target, TargetError),
    "hf": Format("config.json", lambda: config_files.GOOD, _folder, (TargetError, CheckpointError)),
    "toml": Format("pyproject.toml", _toml, _settings, ConfigurationError),
    "baseline": Format("baseline.json", _known, _baseline, ConfigurationError),
    "study": Format("ledger.jsonl", _ledger, _study, StudyError),
}  # fmt: skip


def run(format: str, count: int, seed: int, folder: str) -> dict[str, Any]:
    """Read so many mutations; return what was said, all that should not have been, and the slowest."""
    kind, chance = FORMATS[format], random.Random(seed)
    place = Path(folder)
    kind.beside(place)
    path, sound = place / kind.name, kind.content()
    path.write_bytes(sound)
    kind.read(path)  # the file is sound: what follows is about the mutations
    said, wrong, slowest = Counter[str](), [], 0.0
    for number in range(count):
        content = kind.mutate(sound, chance)
        path.write_bytes(content)
        began = time.process_time()
        try:
            kind.read(path)
            said["read"] += 1
        except kind.error as error:
            said[getattr(error, "code", type(error).__name__)] += 1
        except BaseException as error:
            wrong.append(f"{number}: {type(error).__name__}: {error!s:.200}: {content!r:.2000}")
        slowest = max(slowest, time.process_time() - began)
    return {"said": dict(said), "wrong": wrong[:5], "wrongs": len(wrong), "slowest": slowest}
