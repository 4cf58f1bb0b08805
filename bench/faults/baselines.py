"""What two tools that everybody has say of the same faults: transformers' overflow detector and anomaly mode."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import warnings
from collections.abc import Sequence

import torch

from bench.faults.case import Case
from bench.faults.settings import loss_of

__all__ = ["anomaly_mode", "overflow_detector"]

Said = tuple[bool, bool]  # detected, at the right module


def overflow_detector(case: Case, paths: Sequence[str]) -> Said:
    """Run forward and backward under DebugUnderflowOverflow.

    It is right where the last frame that it prints names a module at fault.
    """
    from transformers.debug_utils import DebugUnderflowOverflow

    twin, printed, raised = case.copied(), io.StringIO(), ""
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            DebugUnderflowOverflow(twin.model)
            loss_of(twin.call()).backward()
        except ValueError as stop:
            raised = str(stop)
        except Exception:  # the tool's hooks fail on outputs that are neither tensors nor tuples of them
            return False, False
    if "inf/nan" not in raised:
        return False, False
    frames = re.findall(r"^\s+([\w.]+) \w+$", printed.getvalue(), flags=re.MULTILINE)
    return True, bool(frames) and any(frames[-1] == p or frames[-1].startswith(f"{p}.") for p in paths)


def anomaly_mode(case: Case, paths: Sequence[str]) -> Said:
    """Run forward and backward under ``torch.autograd.detect_anomaly``.

    It names an op and prints the stack of its forward: right where the innermost frame outside torch lies in the file
    of a module at fault.
    """
    twin = case.copied()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(check_nan=True):
            try:
                loss_of(twin.call()).backward()
            except RuntimeError as stop:
                if "returned nan values" not in str(stop):
                    return False, False
            else:
                return False, False
    text = "\n".join(str(w.message) for w in caught)
    frames = [f for f in re.findall(r'File "(.+?)", line', text) if "/torch/" not in f]
    files = {_file(case, path) for path in paths}
    return True, bool(frames) and frames[-1] in files


def _file(case: Case, path: str) -> str:
    try:
        return inspect.getfile(type(case.module(path)))
    except (AttributeError, TypeError, OSError):
        return ""
