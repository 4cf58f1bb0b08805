"""Run the benchmark of faults: resumable, a line of JSON for each trial.

    python -m bench.faults                what is not done yet, then the summary
    python -m bench.faults --sample 200   200 of the trials, spread over all
    python -m bench.faults --architectures NAME ...   of these alone
    python -m bench.faults --only PART    trials with this in their name (ARCHITECTURE/SETTING/DTYPE/FAULT), again
    python -m bench.faults --summary      only the summary of what is there
    python -m bench.faults --page         write docs/fault-benchmark.md and its Chinese twin from what is there

A trial is a fault in an architecture; a worker process runs it under a time and a memory limit. Results are in
bench/faults/results.jsonl, the last line of a trial counts.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from bench.faults.page import CHINESE, ENGLISH, page, summary
from bench.faults.trial import Trial, key, run, trials
from bench.workers import work

__all__ = ["RESULTS", "main", "read"]

RESULTS = Path(__file__).parent / "results.jsonl"
DOCS = Path(__file__).parents[2] / "docs"
SECONDS = 600  # of a busy machine; a trial takes one or two of a free one
BYTES = 10 * 2**30
PER_WORKER = 150  # transformers keeps every module it imported


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for."""
    options = _options(arguments)
    if not (options.summary or options.page):
        _sweep(_pending(options), options.jobs)
    records = read()
    if options.page:
        (DOCS / "fault-benchmark.md").write_text(page(records, ENGLISH), encoding="utf-8")
        (DOCS / "fault-benchmark.zh-CN.md").write_text(page(records, CHINESE), encoding="utf-8")
    else:
        print(summary(records))
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, metavar="N", help="run N of the trials that are not done")
    parser.add_argument("--architectures", nargs="+", metavar="NAME", help="run trials of these alone")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run trials with this in their name, again")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--summary", action="store_true", help="only print what is there")
    parser.add_argument("--page", action="store_true", help="only write the pages of what is there")
    return parser.parse_args(arguments)


def read(file: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the last record of every trial that still exists, in their order."""
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    last = {key(record): record for record in lines}
    return [last[trial.key] for trial in trials() if trial.key in last]


def _pending(options: argparse.Namespace) -> list[Trial]:
    wanted = set(options.architectures or [trial.architecture for trial in trials()])
    every = [trial for trial in trials() if trial.architecture in wanted]
    if options.only:
        return [trial for trial in every if any(part in trial.key for part in options.only)]
    done = {key(record) for record in read()}
    left = [trial for trial in every if trial.key not in done]
    if options.sample is None or options.sample >= len(left):
        return left
    chosen = set(random.Random(0).sample(range(len(left)), options.sample))
    return [trial for index, trial in enumerate(left) if index in chosen]


def _sweep(pending: list[Trial], jobs: int) -> None:
    with RESULTS.open("a", encoding="utf-8") as out:
        for record in work(pending, run, _failure, jobs=jobs, share=PER_WORKER, seconds=SECONDS, memory=BYTES):
            out.write(json.dumps(record, separators=(",", ":")) + "\n")
            out.flush()
            if record["status"] != "unfit":
                print(f"{key(record):90} {_said(record)}", flush=True)


def _said(record: dict[str, Any]) -> str:
    if record["status"] != "alive":
        return record["status"] + (f": {record['others']}" if record.get("others") else "")
    found = "found" if record["found"] else "missed"
    place = "" if record["right"] or not record["found"] else f", at {record['at']!r}"
    return found + place + (f", also {record['others']}" if record["others"] else "")


def _failure(trial: Trial, why: str) -> dict[str, Any]:
    return {
        "architecture": trial.architecture, "fault": trial.fault, "setting": trial.setting, "dtype": trial.dtype,
        "status": "failed", "why": why,
    }  # fmt: skip
