"""One trial: a fault in an architecture, what the check finds, and what it costs."""

from __future__ import annotations

import random
import time
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from bench.faults import baselines, replays
from bench.faults.architectures import ARCHITECTURES
from bench.faults.case import Case, Fault, Observed, Unfit
from bench.faults.injectors import FAULTS
from bench.faults.liveness import difference, floor, observe
from bench.faults.settings import healthy
from normwise.checkup import Finding, Report, Severity
from normwise.facts.records import Sublayer

__all__ = ["HEALTHY", "REPLAY", "Trial", "alive", "injected", "key", "run", "trials"]

# Rules whose pages say that the modules behind the first one only read or pass on what it made.
FIRST_BLAMED = {"NUM008", "NUM009", "PLC001"}
HEALTHY = "none"  # the fault of a healthy model
REPLAY = "replay"
Found = list[str]  # code, severity, path


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run: a fault, or none, in an architecture under a setting in a dtype."""

    architecture: str
    fault: str
    setting: str
    dtype: str

    @property
    def key(self) -> str:
        """The identity of the trial in the results."""
        return f"{self.architecture}/{self.setting}/{self.dtype}/{self.fault}"


def key(record: dict[str, Any]) -> str:
    """Return the identity of a record's trial."""
    return f"{record['architecture']}/{record['setting']}/{record['dtype']}/{record['fault']}"


def trials(architectures: Sequence[str] = ARCHITECTURES, faults: Sequence[str] = tuple(FAULTS)) -> list[Trial]:
    """Return every trial, those of one healthy model beside each other and the healthy one first."""
    made = []
    for architecture in architectures:
        groups: dict[tuple[str, str], list[Trial]] = {}
        for name in faults:
            fault = FAULTS[name]
            dtype = str(fault.dtype).removeprefix("torch.")
            group = groups.setdefault((fault.setting, dtype), [Trial(architecture, HEALTHY, fault.setting, dtype)])
            group.append(Trial(architecture, name, fault.setting, dtype))
        made += [trial for group in groups.values() for trial in group]
    return made + [Trial(name, REPLAY, "given", "given") for name in replays.NAMES if architectures is ARCHITECTURES]


@lru_cache(maxsize=1)
def _sound(architecture: str, setting: str, dtype: str) -> Case:
    return healthy(architecture, setting, getattr(torch, dtype))


@lru_cache(maxsize=1)
def _report_of_sound(architecture: str, setting: str, dtype: str) -> Report:
    return check(_sound(architecture, setting, dtype).copied())


def check(case: Case) -> Report:
    """Check a case."""
    import normwise as nw

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nw.check(case.model, case.inputs, **case.evidence)


def loud(report: Report) -> list[Finding]:
    """Return the findings above info."""
    return [f for f in report.findings if f.severity is not Severity.INFO]


def injected(trial: Trial, sound: Case) -> tuple[Case, list[str]]:
    """Return a faulty copy and the paths of the modules at fault; the choice follows from the trial's name.

    Raises:
        Unfit: the fault cannot be put into this architecture.
    """
    case = sound.copied()
    case.random = random.Random(zlib.crc32(trial.key.encode()))
    paths = list(FAULTS[trial.fault].inject(case))
    try:
        with torch.no_grad():
            case.copied().call()
    except Exception as error:  # what stops the model is seen by everybody
        raise Unfit(f"the model no longer runs: {type(error).__name__}: {error}"[:160]) from error
    return case, paths


def run(trial: Trial) -> dict[str, Any]:
    """Run a trial and return its record.

    Its status is "healthy", "unfit" (with ``why``), "equivalent" (the fault does nothing), "alive",
    "replayed" or "failed".
    """
    record: dict[str, Any] = {
        "architecture": trial.architecture, "fault": trial.fault, "setting": trial.setting, "dtype": trial.dtype,
    }  # fmt: skip
    started = time.process_time()
    try:
        return record | _run(trial) | {"cpu": round(time.process_time() - started, 2)}
    except Unfit as unfit:
        return record | {"status": "unfit", "why": str(unfit)}
    except Exception as error:  # the benchmark goes on and shows it
        return record | {"status": "failed", "why": f"{type(error).__name__}: {error}"[:200]}


def _run(trial: Trial) -> dict[str, Any]:
    if trial.fault == REPLAY:
        return replays.run(trial.architecture)
    group = (trial.architecture, trial.setting, trial.dtype)
    sound = _sound(*group)
    if trial.fault == HEALTHY:
        report = _report_of_sound(*group)
        return {"status": "healthy", "seconds": round(report.cost.seconds, 2), "others": _said(loud(report))}
    fault = FAULTS[trial.fault]
    case, paths = injected(trial, sound)
    allowed = places(sound, paths)
    if not alive(sound, case, fault):
        return {"status": "equivalent"}
    report = check(case.copied())
    return {
        "status": "alive",
        "paths": len(paths),
        "seconds": round(report.cost.seconds, 2),
        **judged(fault, report, _report_of_sound(*group), allowed),
        "detector": baselines.overflow_detector(case, paths),
        "anomaly": baselines.anomaly_mode(case, paths),
    }


def alive(sound: Case, case: Case, fault: Fault) -> bool:
    """Whether the fault does anything."""
    return difference(_observed(fault, sound), observe(fault, case)) > floor(fault)


def _observed(fault: Fault, sound: Case) -> Observed:
    """Return what shows whether the fault is alive in the healthy model: once for all faults that are shown alike."""
    shown = (sound, fault.observe)
    if shown not in _OBSERVED:
        if any(held is not sound for held, _ in _OBSERVED):
            _OBSERVED.clear()
        _OBSERVED[shown] = observe(fault, sound)
    return _OBSERVED[shown]


_OBSERVED: dict[tuple[Case, object], Observed] = {}


def places(sound: Case, paths: Sequence[str]) -> set[str]:
    """Return the modules at fault, their direct owners, and the residual sublayers that they belong to."""
    owners = {p.rpartition(".")[0] for p in paths}
    members = {m.path for s in sound.placement.stacks for m in s.members if _belongs(m, paths)}
    return ({*paths} | owners | members) - {""}


def _belongs(member: Sublayer, paths: Sequence[str]) -> bool:
    return bool(set(member.norms) & set(paths)) or any(p.startswith(f"{member.path}.") for p in paths)


def right(finding: Finding, allowed: set[str]) -> bool:
    """Whether the first module that a finding names, and nine tenths of all that it blames, are at fault."""
    paths = finding.paths[:1] if finding.code in FIRST_BLAMED else finding.paths
    hits = [p in allowed or any(p.startswith((f"{a}.", f"{a}#")) for a in allowed) for p in paths]
    return hits[0] and sum(hits) >= 0.9 * len(hits)


def judged(fault: Fault, report: Report, sound: Report, allowed: set[str]) -> dict[str, Any]:
    """Return whether the fault was found, whether the module is right, and what else was said.

    Others are findings above info of rules that the fault does not concern and that the healthy twin does not have.
    """
    about = [f for f in report.findings if f.code in fault.codes]
    heard = [f for f in about if fault.information or f.severity is not Severity.INFO]
    known = {(f.code, f.path) for f in loud(sound)}
    others = [f for f in loud(report) if f.code not in (*fault.codes, *fault.effects)]
    return {
        "found": bool(heard),
        "first": bool(heard) and report.findings[0].code in fault.codes,
        "right": any(right(f, allowed) for f in heard),
        "at": heard[0].path if heard else "",
        "whispered": bool(about) and not heard,
        "others": _said([f for f in others if (f.code, f.path) not in known]),
    }


def _said(findings: Sequence[Finding]) -> list[Found]:
    return [[f.code, str(f.severity), f.path] for f in findings]
