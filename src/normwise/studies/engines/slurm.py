"""Slurm, through submitit: ``slurm`` submits every trial as a job of one core, from a login node.

Partition, account and the like are Slurm's own settings: ``SBATCH_PARTITION``, ``SBATCH_ACCOUNT``, ``SBATCH_QOS``,
``SBATCH_TIMELIMIT`` in the environment. What is submitted, and the logs of jobs, are in a folder of this run beside the
ledger, which the nodes must see; it is removed at the end. ``slurm://local`` runs
the jobs on this machine without Slurm, to try things out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import ceil
from pathlib import Path
from threading import Event, Lock
from time import monotonic, sleep
from typing import Any

from normwise.errors import StudyError
from normwise.studies._execute import Answer, Order
from normwise.studies.engines._apart import apart
from normwise.studies.engines._threads import Function, Run, Threads

__all__ = ["EXAMPLE", "check", "claims", "start"]

EXAMPLE = "slurm"

_LOCAL = "slurm://local"
_PATIENCE = 10  # s for the controller to answer
_JOBS = 32  # in the queue at a time: clusters limit them, mostly to hundreds
_TICK = 0.5  # s between two looks at the file of the answer
_ASK_SLURM = 30.0  # s between two questions to the accounting, which tells of jobs that died; one for all jobs
_MINUTES = 60  # of a job whose trial has no time limit: the longest trials here take a few
_STARTING = 5  # minutes that a job has beside the time limit of its trial: imports from a slow disk
_BESIDE = 2**30  # bytes that a job has beside the memory limit of its trial: the libraries, the process that waits
_TAIL = 2000  # characters of the log of a job that was lost
_INTERRUPTED = Answer(outcome="killed", error="interrupted")
_ENDS = {"TIMEOUT": "timeout", "OUT_OF_MEMORY": "memory"}  # what Slurm calls them


def claims(text: str) -> bool:
    """Return whether the text means Slurm."""
    return re.match(r"slurm\b", text) is not None


def check(text: str) -> None:
    """Refuse other forms."""
    if text not in ("slurm", _LOCAL):
        raise StudyError(f"{text} is no form of Slurm: give slurm, or {_LOCAL} to run its jobs on this machine")


@contextmanager
def start(text: str, workers: int | None, folder: Path) -> Iterator[Threads]:
    """Submit jobs; those that are left at the end are cancelled."""
    try:
        import submitit
    except ImportError:
        raise StudyError("submitit is not installed: pip install 'normwise[slurm]'") from None
    local = text == _LOCAL
    if not local:
        _ask_controller()
    with _within(folder) as jobs:
        executor = (submitit.LocalExecutor if local else submitit.SlurmExecutor)(jobs)
        session = Threads(workers or ((os.cpu_count() or 1) if local else _JOBS), _through(executor, local))
        try:
            yield session
        finally:
            session.end()


def _ask_controller() -> None:
    missing = [command for command in ("sbatch", "srun", "sacct", "scancel", "sinfo") if shutil.which(command) is None]
    if missing:
        raise StudyError(f"no Slurm here, {missing[0]} is not found: run this on a login node of the cluster")
    try:
        asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        raise StudyError(f"Slurm does not answer: sinfo said nothing for {_PATIENCE} s") from None
    if asked.returncode:
        raise StudyError(f"Slurm does not answer: {asked.stderr.strip()}")


@contextmanager
def _within(folder: Path) -> Iterator[Path]:
    try:
        jobs = Path(tempfile.mkdtemp(prefix="slurm-", dir=folder.absolute()))
    except OSError as failure:
        raise StudyError(
            f"{folder.absolute()}: {failure.strerror}: jobs are submitted from there, give a --ledger in a folder that "
            "can be written to and that the nodes see"
        ) from None
    try:
        yield jobs
    finally:
        shutil.rmtree(jobs, ignore_errors=True)  # a job that is being cancelled may still write


def _through(executor: Any, local: bool) -> Run:
    """Return what has Slurm run a trial, and waits."""
    submitting = Lock()  # the executor holds the settings of the next job

    def run(function: Function, order: Order, stop: Event) -> Answer:
        with submitting:
            if stop.is_set():
                return _INTERRUPTED
            executor.update_parameters(**_settings(order, local))
            try:
                job = executor.submit(apart(function), asdict(order))
            except Exception as refusal:
                raise StudyError(f"Slurm takes no job: {str(refusal).strip()}") from None
        asked = monotonic()
        while not job.done(force_check=(due := monotonic() - asked > _ASK_SLURM)):
            asked = monotonic() if due else asked
            if stop.wait(_TICK):
                _cancel(job, local)
                return _INTERRUPTED
        return _answer(job, local)

    return run


def _settings(order: Order, local: bool) -> dict[str, Any]:
    minutes = _MINUTES if order.time_limit is None else ceil(order.time_limit / 60) + _STARTING
    if local:
        return {"timeout_min": minutes}
    memory = {} if order.memory_limit is None else {"mem": f"{ceil((order.memory_limit + _BESIDE) / 2**20)}MB"}
    return {"job_name": "normwise", "time": minutes, "nodes": 1, "ntasks_per_node": 1, "cpus_per_task": 1, **memory}


def _cancel(job: Any, local: bool) -> None:
    job.cancel(check=False)
    given_up = monotonic() + _PATIENCE
    while local and not job.done() and monotonic() < given_up:  # its processes are ours
        sleep(_TICK / 10)


def _answer(job: Any, local: bool) -> Answer:
    """Return what a job left; one that left nothing was lost."""
    if not local or job.paths.result_pickle.exists():  # else submitit waits for a slow disk
        error = job.exception()
        if error is None:
            return Answer(**job.result())
    state = job.state
    said = f"job {job.job_id} ended as {state} and without an answer\n{(job.stderr() or '').strip()[-_TAIL:]}"
    return Answer(outcome=_ENDS.get(state, "killed"), error=said.strip())
