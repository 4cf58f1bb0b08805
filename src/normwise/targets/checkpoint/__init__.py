"""A checkpoint by itself: FILE.safetensors, an index of shards, a folder with them, or a .pt, .pth, .bin or .ckpt file.

Of safetensors the headers are read and the norms, nothing else; a config.json beside them says what the family does
with its gains. No code is run and nothing is built, so what needs a run of the model is "not checked". A pickle is
opened by torch with ``weights_only=True`` in a process of its own with limits.

Whatever the bytes are, reading them ends in a ``Stored`` or in a ``CheckpointError`` whose code is one of ``CODES``.
"""

from __future__ import annotations

import os
from pathlib import Path

from normwise.errors import CheckpointError, TargetError
from normwise.targets.checkpoint.limits import CODES
from normwise.targets.checkpoint.places import config_beside, is_checkpoint, open_source
from normwise.targets.checkpoint.skeleton import skeleton
from normwise.targets.checkpoint.stored import Stored, StoredNorm, stored
from normwise.targets.python_file import PREFIXES
from normwise.targets.target import InputsFrom, Target, Weights

__all__ = ["CODES", "EXAMPLE", "Stored", "StoredNorm", "claims", "load", "read"]

EXAMPLE = "FILE.safetensors"


def claims(text: str) -> bool:
    """Tell whether the text is the path of a file of weights, or of a folder with weights or a config.json."""
    try:
        return bool(text) and not text.startswith(PREFIXES) and is_checkpoint(Path(text).expanduser())
    except (OSError, ValueError, RuntimeError):  # a text that can be no path
        return False
    except CheckpointError:  # a folder that cannot be listed: reading it says so
        return True


def load(text: str, *, inputs: str | None = None) -> Target:
    """Read a checkpoint.

    Args:
        text: its path.
        inputs: not taken: there is nothing to run.

    Raises:
        TargetError: inputs were given, or there is no such file.
        CheckpointError: it is not read; the code says why.
    """
    if inputs is not None:
        raise TargetError(f"{text}: a checkpoint has no forward to take inputs; give FILE.py:callable that loads it")
    if not os.path.lexists(Path(text).expanduser()):
        raise TargetError(f"{text}: there is no such file")
    found = read(text)
    return Target(
        model=skeleton(found.norms),
        name=text,
        inputs_from=InputsFrom.NONE,
        weights=Weights.REAL,
        notes=found.notes,
        config=found.config,
        stored=found,
    )


def read(path: str | Path) -> Stored:
    """Read the headers and the norms of a checkpoint: the single way in, whatever the file is.

    Args:
        path: a file, an index or a folder.

    Returns:
        Its tensors by name and form, its norms with their numbers, its config.json, and how much was read.

    Raises:
        CheckpointError: it is broken, hostile, needs code, or is beyond a limit.
    """
    place = Path(path).expanduser()
    config, notes = config_beside(place)
    source = open_source(place)
    try:
        return stored(source, str(path), config, notes)
    finally:
        source.close()
