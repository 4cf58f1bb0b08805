"""What a path names: a file, an index, or the weights of a folder; and the config.json beside them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from normwise.rendering import both, clean
from normwise.targets.checkpoint import json_text
from normwise.targets.checkpoint.archive import convert
from normwise.targets.checkpoint.files import whole
from normwise.targets.checkpoint.limits import CONFIG_BYTES, broken
from normwise.targets.checkpoint.pickled import SUFFIXES, Pickled
from normwise.targets.checkpoint.sources import INDEX, SUFFIX, SafetensorsFile, Sharded, Source

__all__ = ["config_beside", "is_checkpoint", "open_source"]

_CONFIG = "config.json"
_PICKLED_INDEX = ".bin.index.json"
_LISTED = 20_000  # files of a folder
_USUAL = ("model", "pytorch_model", "diffusion_pytorch_model")  # the weights of a folder that holds several files


def is_checkpoint(path: Path) -> bool:
    """Whether a path is that of a checkpoint: a file of a known name, or a folder with weights or a config.json."""
    if path.is_dir():
        return any(_weighty(name) or name == _CONFIG for name in _names(path))
    return path.name.lower().endswith((SUFFIX, INDEX, _PICKLED_INDEX, *SUFFIXES))


def open_source(path: Path) -> Source:
    """Open what a path names.

    Raises:
        CheckpointError: it cannot be read, or is not sound.
    """
    file = _weights_of(path) if path.is_dir() else path
    name = file.name.lower()
    if name.endswith(INDEX):
        return Sharded(file)
    if name.endswith(_PICKLED_INDEX):
        why = "its shards are pickles; convert each where you trust it, or let save_pretrained write safetensors:\n"
        raise broken("pickled-shards", str(file), why + convert("pytorch_model-00001.bin"))
    return Pickled(file) if name.endswith(SUFFIXES) else SafetensorsFile(file)


def config_beside(path: Path) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """Return the config.json of a folder, or of the folder of a file, and what the report has to say of it.

    Raises:
        CheckpointError: it is no JSON object, or too large.
    """
    file = (path if path.is_dir() else path.parent) / _CONFIG
    if not file.exists():
        return None, ()
    data, _ = whole(file, CONFIG_BYTES)
    config = json_text.parse(data, str(file), most=CONFIG_BYTES)
    if not isinstance(config, dict):
        raise broken("bad-config", str(file), "this is no JSON object, so it says nothing of the model")
    named = config.get("model_type")
    family = f" (model_type {clean(named)[:80]})" if isinstance(named, str) else ""
    notes = [both(f"conventions from config.json{family}", f"约定取自 config.json{family}")]
    if "auto_map" in config:
        notes.append(
            both(
                "config.json points to code of its own (auto_map), which was not run",
                "config.json 指向自带的代码（auto_map），未运行",
            )
        )
    return config, tuple(notes)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in islice(folder.iterdir(), _LISTED))
    except OSError as error:
        raise broken("unreadable", str(folder), f"it cannot be listed: {error.strerror}") from None


def _weighty(name: str) -> bool:
    return name.lower().endswith((SUFFIX, INDEX, _PICKLED_INDEX, *SUFFIXES))


def _weights_of(folder: Path) -> Path:
    """Return the weights of a folder: an index before files, safetensors before pickles."""
    names = [name for name in _names(folder) if _weighty(name)]
    for suffixes in ((INDEX,), (SUFFIX,), (_PICKLED_INDEX,), SUFFIXES):
        found = [name for name in names if name.lower().endswith(suffixes)]
        usual = [name for name in found if name.partition(".")[0] in _USUAL]
        if len(usual) == 1 or len(found) == 1:
            return folder / (usual if len(usual) == 1 else found)[0]
        if found:
            listed = ", ".join(clean(name) for name in found[:4])
            raise broken("several-weights", str(folder), f"several files of weights and no index: give one of {listed}")
    raise broken(
        "no-weights", str(folder), f"the folder has a config.json and no weights; hf:{folder} checks its architecture"
    )
