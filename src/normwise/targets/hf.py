"""A model type of transformers: hf:TYPE, for example hf:llama or hf:wav2vec2.

The model is made from transformers' default configuration with depth and widths reduced but the ratios
that decide structure kept; its weights are random, its inputs generated. Nothing is downloaded, no remote
code is run. A folder on disk is hf:DIR.
"""

from __future__ import annotations

import difflib
import gc
from typing import Any

from normwise.errors import TargetError
from normwise.targets import folder
from normwise.targets.hf_build import (
    build_fake,
    build_model,
    count_numbers,
    library,
    model_class,
    model_types,
    quiet,
)
from normwise.targets.hf_config import build_config, departures, parts
from normwise.targets.hf_inputs import example_inputs, find_inputs, one_line, refuse_objects
from normwise.targets.target import InputsFrom, Target, Weights

__all__ = ["EXAMPLE", "build_config", "build_fake", "claims", "example_inputs", "load"]

EXAMPLE = "hf:TYPE"
_PREFIX = "hf:"
_LARGEST = 500_000_000  # parameters of a model whose widths had to be kept
_REDUCED = "depth and widths of the default configuration reduced, random weights, inputs generated"
_SHALLOW = "depth of the default configuration reduced, widths kept, random weights, inputs generated"


def claims(text: str) -> bool:
    """Tell whether the text is ``hf:`` and a name, not a folder."""
    return text.startswith(_PREFIX) and not folder.claims(text)


def load(text: str, *, inputs: str | None = None) -> Target:
    """Build the small model of a type and inputs it runs on.

    Args:
        text: ``hf:TYPE``.
        inputs: a shape; the generated inputs are then left out.

    Raises:
        TargetError: transformers is missing, the type is unknown, or it cannot be built or fed.
    """
    library(text)
    with quiet():
        model_type = _known(text.removeprefix(_PREFIX))
        failures = []
        for widths, note in ((True, _REDUCED), (False, _SHALLOW)):
            try:
                return _target(text, model_type, widths=widths, note=note, generate=inputs is None)
            except Exception as error:  # whatever transformers raises on a configuration it cannot build or run
                failures.append(str(error) if isinstance(error, TargetError) else f"cannot be built: {one_line(error)}")
                gc.collect()
    raise TargetError(f"{text}: {failures[0]}")


def _target(text: str, model_type: str, *, widths: bool, note: str, generate: bool) -> Target:
    config = build_config(model_type, widths=widths)
    if not widths and count_numbers(config)[0] > _LARGEST:
        raise TargetError("too large with its widths kept")
    _refuse_timm(config)
    cls = model_class(config)
    if generate:
        refuse_objects(cls)
    model = build_model(config, cls)
    note_rest = departures(model_type)
    if not generate:
        return Target(model=model, name=text, config=config, weights=Weights.RANDOM, notes=(note, *note_rest))
    found = find_inputs(model)
    return Target(
        model=model, name=text, kwargs=found.kwargs, config=config, inputs_from=InputsFrom.INFERRED,
        weights=Weights.RANDOM, notes=(note, *note_rest, *found.notes),
    )  # fmt: skip


def _refuse_timm(config: Any) -> None:
    """Say what is missing where transformers builds a tower with timm, which it takes only with what timm reads."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
    from transformers.utils.import_utils import is_timm_available, is_vision_available

    missing = not (is_timm_available() and is_vision_available())
    built = [MODEL_MAPPING_NAMES.get(part.model_type) for part in parts(config)]
    if missing and "TimmWrapperModel" in built:
        raise TargetError("transformers builds a tower of it with timm: pip install timm torchvision pillow")


def _known(name: str) -> str:
    alike = {_plain(known): known for known in model_types()}
    if name in alike.values():
        return name
    if _plain(name) in alike:
        return alike[_plain(name)]
    near = [alike[match] for match in difflib.get_close_matches(_plain(name), alike, n=3, cutoff=0.5)]
    guess = f"the nearest are {', '.join(near)}" if near else "hf:llama and hf:bert are two"
    raise TargetError(f"hf:{name}: transformers {_version()} has no model type {name!r}; {guess}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _version() -> str:
    import transformers

    return transformers.__version__
