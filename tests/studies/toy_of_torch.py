"""The toy, with torch loaded before a trial starts, as real studies have it."""

from __future__ import annotations

import torch as torch

from tests.studies.toy import VERSION as VERSION
from tests.studies.toy import measure as measure
