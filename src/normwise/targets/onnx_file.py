"""An ONNX model: FILE.onnx, run operator by operator in torch, so that its map is read as any other.

Norms are found whether they are one operator or written out. Only data is read: the file, and weights kept beside it
where the file names one in the same folder. Names of modules are those that the exporter left in the file.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from normwise.errors import TargetError
from normwise.targets.programs_of_others import names_file, reading
from normwise.targets.target import InputsFrom, Target, Weights

__all__ = ["EXAMPLE", "claims", "load"]

EXAMPLE = "FILE.onnx"
_LARGEST = 2**31  # bytes: no message of protobuf is larger


def claims(text: str) -> bool:
    """Tell whether the text ends in ``.onnx``."""
    return names_file(text, ".onnx")


def load(text: str, *, inputs: str | None = None) -> Target:
    """Read the file and make inputs that it runs on.

    Args:
        text: ``FILE.onnx``.
        inputs: a shape; the generated inputs are then left out.

    Raises:
        TargetError: onnx is missing, the file is no ONNX model, or uses what is not supported.
    """
    if importlib.util.find_spec("onnx") is None:
        raise TargetError(f"{text}: this needs onnx, which is not installed; pip install 'normwise[onnx]'")
    path = Path(text).expanduser()
    if not path.is_file():
        raise TargetError(f"{text}: there is no such file")
    if path.stat().st_size >= _LARGEST:
        raise TargetError(
            f"{text}: the file is larger than any ONNX model can be (2 GB); weights go into a file beside it"
        )
    with reading(text, "model"):
        return _read(path, text, generate=inputs is None)


def _read(path: Path, text: str, *, generate: bool) -> Target:
    from normwise.targets.onnx_graph import read_program
    from normwise.targets.onnx_inputs import generated

    source = read_program(path)
    if not generate:
        return Target(model=source.program, name=text, weights=Weights.REAL, notes=source.notes)
    args, note = generated(source)
    return Target(
        model=source.program, name=text, args=args, inputs_from=InputsFrom.INFERRED,
        weights=Weights.RANDOM if source.drawn else Weights.REAL, notes=(note, *source.notes),
    )  # fmt: skip
