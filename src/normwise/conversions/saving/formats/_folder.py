"""What the formats of transformers folders share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normwise.conversions.saving.output import Output
from normwise.conversions.saving.publishing import write_text

__all__ = ["write_settings"]


def write_settings(folder: Path, output: Output, config: Mapping[str, Any]) -> None:
    """Write config.json, and generation_config.json where no folder is there to copy it from."""
    write_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    generation = getattr(output.model, "generation_config", None)
    if output.others is None and generation is not None:
        write_text(folder / "generation_config.json", generation.to_json_string())
