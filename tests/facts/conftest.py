"""The tests of this folder never reach a model hub."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
