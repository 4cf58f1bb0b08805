"""An exported program: FILE.pt2, as torch.export.save writes it.

``torch.export.load`` unpickles the example inputs and evaluates the expressions of dynamic shapes, so it can run code
of the file. Here only data is read: the graph (JSON), the weights (raw bytes), and example inputs that hold tensors and
nothing else. The operators are those of ATen; nothing else is called.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from torch.export import ExportedProgram
from torch.export import save as save_program

from normwise.errors import TargetError
from normwise.targets.programs_of_others import names_file, reading
from normwise.targets.pt2_archive import Archive
from normwise.targets.pt2_graph import read_program
from normwise.targets.target import InputsFrom, Target, Weights

__all__ = ["EXAMPLE", "claims", "from_object", "load"]

EXAMPLE = "FILE.pt2"


def claims(text: str) -> bool:
    """Tell whether the text ends in ``.pt2``."""
    return names_file(text, ".pt2")


def load(text: str, *, inputs: str | None = None) -> Target:
    """Read the file; its example inputs are used.

    Args:
        text: ``FILE.pt2``.
        inputs: a shape; the example inputs are then left out.

    Raises:
        TargetError: no exported program, one that needs code to be run, or one with operators of others.
    """
    path = Path(text).expanduser()
    if not path.is_file():
        raise TargetError(f"{text}: there is no such file")
    with path.open("rb") as file:
        return _read(file, text, Weights.REAL, examples=inputs is None)


def from_object(program: ExportedProgram) -> Target:
    """Return the target of a program in memory, by the way of its file."""
    buffer = io.BytesIO()
    save_program(program, buffer)
    return _read(buffer, "ExportedProgram", Weights.GIVEN, examples=True)


def _read(file: io.BufferedIOBase, text: str, weights: Weights, *, examples: bool) -> Target:
    with reading(text, "program"):
        try:
            found = read_program(Archive(file))
            if not examples:
                return Target(model=found.program, name=text, weights=weights)
            args, note = found.inputs()
        except zipfile.BadZipFile as error:
            raise TargetError("this is no exported program of torch; write it with torch.export.save") from error
        found.program.rehearse(*args)
    return Target(
        model=found.program, name=text, args=args, weights=weights, notes=(note,),
        inputs_from=InputsFrom.GIVEN if found.given else InputsFrom.INFERRED,
    )  # fmt: skip
