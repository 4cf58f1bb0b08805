"""What is saved: a plan with the tensors it makes, and the model that they are for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from normwise.conversions._edits import Untie
from normwise.conversions._plan import Plan
from normwise.conversions.saving.checkpoint import Checkpoint
from normwise.conversions.saving.weights import Weights

__all__ = ["Output", "is_transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a format writes.

    Args:
        plan: what was done.
        model: of the class that was planned; its storage is not looked at, so a fake one will do.
        weights: the converted tensors.
        checkpoint: where they come from, if they were read from disk.
        others: the folder whose other files (tokenizer, generation settings) belong to the model.
    """

    plan: Plan
    model: nn.Module
    weights: Weights
    checkpoint: Checkpoint | None = None
    others: Path | None = None

    @property
    def class_name(self) -> str:
        """Return the name of the model's class."""
        return type(self.model).__name__

    def sources(self) -> tuple[Path, ...]:
        """Return the files and folders that are read and must stay as they are."""
        if self.checkpoint is not None:
            return (*self.checkpoint.sources(), *(() if self.others is None else (self.others,)))
        if self.others is None:
            return ()
        weights = any(self.others.glob("*.safetensors"))
        return (*(Checkpoint.open(self.others).sources() if weights else ()), self.others)

    def config(self) -> dict[str, Any]:
        """Return the configuration of a transformers model, truthful about ties."""
        config = self._source_config()
        if any(isinstance(edit, Untie) for edit in self.plan.edits):
            config["tie_word_embeddings"] = False
        return config

    def _source_config(self) -> dict[str, Any]:
        given: Any = self.model.config
        if self.others is not None and (self.others / "config.json").is_file():
            found = json.loads((self.others / "config.json").read_text(encoding="utf-8"))
            return found if self.checkpoint else {**found, "architectures": [self.class_name]}
        config: Mapping[str, Any] = json.loads(given.to_json_string())
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return {**config, "architectures": [self.class_name], "dtype": dtype}


def is_transformers(model: nn.Module) -> bool:
    """Tell whether a model is one of transformers, without loading transformers for one that is not."""
    return any(cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
               for cls in type(model).__mro__)  # fmt: skip
