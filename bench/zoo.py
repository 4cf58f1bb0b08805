"""Map every architecture of transformers at tiny size: resumable, a line of JSON for each model type.

    python bench/zoo.py                  what is not done yet, then the summary
    python bench/zoo.py --only TYPE ...  these types, again
    python bench/zoo.py --redo failed    the failures again (or: all)
    python bench/zoo.py --summary        only the summary of what is there
    python bench/zoo.py --convert NAME   the proof of a conversion on each type instead of its map
    python bench/zoo.py --maps           the maps without the checks
    python bench/zoo.py --timm           the smallest architecture of each family of timm instead

A TYPE is one of transformers, or any TARGET with its prefix (timm:resnet18).

Each type is run in a worker process under a time and a memory limit; a worker that dies or hangs is
replaced and the type counts as failed. Results are in zoo/results.jsonl (zoo/NAME.jsonl for a conversion), the last
line of a type counts.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "zoo"
TIMM = Path(__file__).with_name("timm.txt")  # the fewest parameters in each module of timm 1.0.31
SECONDS = 120
BYTES = 10 * 2**30
_ONE_FILE = ("map", "maps", "load")  # tasks whose records are of one kind
PER_WORKER = 60  # a fresh process now and then: transformers keeps every module it imported
HAND_WRITTEN = {"layer", "rms", "scale"}


def main() -> int:
    """Run what was asked for and print the summary."""
    options = _options()
    task = options.convert or ("load" if options.no_map else "maps" if options.maps else "map")
    if not options.summary:
        sweep(_pending(options, read(task)), options.jobs, task)
    done = {name: record for name, record in read(task).items() if name.startswith("timm:") == options.timm}
    print(_summary_of(task)(done))
    if options.page:
        import zoo_conversions

        options.page.write_text(zoo_conversions.page(task, read(task)), encoding="utf-8")
    return 0


def _summary_of(task: str) -> Callable[[dict[str, dict[str, Any]]], str]:
    if task in _ONE_FILE:
        return summary
    import zoo_conversions  # beside this file, which is run as a script

    return zoo_conversions.summary


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="run these types, also if they are done")
    parser.add_argument("--redo", choices=("failed", "all"), help="run again what is done")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--timm", action="store_true", help="run the smallest architecture of each family of timm")
    parser.add_argument("--no-map", action="store_true", help="only build and run the models")
    parser.add_argument("--maps", action="store_true", help="map the models, without the checks")
    parser.add_argument("--summary", action="store_true", help="only print what is there")
    parser.add_argument("--convert", metavar="NAME", help="prove this conversion on each type")
    parser.add_argument("--page", metavar="FILE", type=Path, help="write the list of what was converted")
    return parser.parse_args()


def _pending(options: argparse.Namespace, done: dict[str, dict[str, Any]]) -> list[str]:
    if options.only:
        return options.only
    if options.timm:
        return [name for name in TIMM.read_text(encoding="utf-8").split() if name not in done]
    from normwise.targets.hf_build import model_types

    keep = {
        None: lambda name: name not in done,
        "failed": lambda name: not done.get(name, {}).get("ran"),
        "all": lambda name: True,
    }[options.redo]
    return [name for name in model_types() if keep(name)]


def results(task: str) -> Path:
    """Return the file with the records of a task."""
    return FOLDER / f"{'results' if task in _ONE_FILE else task}.jsonl"


def read(task: str = "map") -> dict[str, dict[str, Any]]:
    """Return the last record of every type."""
    file = results(task)
    if not file.exists():
        return {}
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return {record["type"]: record for record in records}


# workers


def sweep(names: list[str], jobs: int, task: str) -> None:
    """Run the types and append a record for each."""
    from workers import work  # beside this file, which is run as a script

    FOLDER.mkdir(exist_ok=True)
    each = functools.partial(run, task=task)
    records = work(names, each, failure, jobs=jobs, share=PER_WORKER, seconds=SECONDS, memory=BYTES)
    with results(task).open("a", encoding="utf-8") as out:
        for record in records:
            out.write(json.dumps(record) + "\n")
            out.flush()
            _show(record)


def _show(record: dict[str, Any]) -> None:
    state = "ran" if record["ran"] else record["error"]
    print(f"{record['type']:34} {record['seconds']:6.2f} s  {state}", flush=True)


def failure(name: str, error: str) -> dict[str, Any]:
    """Return the record of a type that did not come to its end."""
    return {"type": name, "built": False, "ran": False, "params": 0, "seconds": 0.0, "error": error}


def run(name: str, task: str = "map") -> dict[str, Any]:
    """Build and run one type and return its record."""
    from normwise import targets

    text = name if ":" in name else f"hf:{name}"
    start = time.perf_counter()
    record = failure(name, "")
    try:
        target = targets.load(text)
    except Exception as error:  # what is no TargetError is a fault of normwise: the sweep goes on and shows it
        record["error"] = str(error).removeprefix(f"{text}: ")[:400] or type(error).__name__
        record["built"] = "no generated inputs" in str(error)
    else:
        params = sum(parameter.numel() for parameter in target.model.parameters())
        record |= {"built": True, "ran": True, "params": params, "notes": list(target.notes), "error": None}
        given = dict(enumerate(target.args)) | dict(target.kwargs)
        record["inputs"] = {str(key): list(getattr(value, "shape", ())) for key, value in given.items()}
        record["load_seconds"] = round(time.perf_counter() - start, 3)
        record |= _examined(target, task)
    record["seconds"] = round(time.perf_counter() - start, 3)
    return record


def _examined(target: Any, task: str) -> dict[str, Any]:
    if task == "load":
        return {}
    if task in _ONE_FILE:
        return examine(target, checks=task == "map")
    import zoo_conversions

    return zoo_conversions.examine(target, task)


# the map


def examine(target: Any, *, checks: bool = True) -> dict[str, Any]:
    """Return facts of the map of one target, what it took, and the findings above info where it is checked.

    Class names with "norm" in them are a yardstick only: the map never reads them.
    """
    from zoo_checks import check_all  # beside this file, which is run as a script

    from normwise.checkup import map

    try:
        started = time.perf_counter()
        report = map(target)
        seconds = time.perf_counter() - started
        checked = check_all(target) if checks else {}
    except Exception as error:
        return {"map_error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    executed = _executed_norms(target)
    found = {site.path.partition("#")[0] for site in (*report.norms, *report.listed_apart)}
    written = [site for site in report.norms if not site.native and site.spec and site.spec.kind in HAND_WRITTEN]
    return {
        "map_seconds": round(seconds, 3),
        **checked,
        "norm_modules": len(executed),
        "norm_modules_found": len(executed & found),
        "norm_modules_missed": sorted(executed - found)[:10],
        "hand_written": len(written),
        "hand_written_verified": sum(site.evidence == "verified" for site in written),
        "stacks": [str(stack.kind) for stack in report.placement.stacks],
    }


def _executed_norms(target: Any) -> set[str]:
    """Return the paths of executed leaf modules whose class name contains "norm"."""
    import torch

    seen: set[str] = set()
    hooks = [
        module.register_forward_hook(lambda *_, path=path: seen.add(path))
        for path, module in target.model.named_modules()
        if "norm" in type(module).__name__.lower() and not list(module.children())
    ]
    try:
        with torch.no_grad():
            target.run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


# the summary


def summary(done: dict[str, dict[str, Any]]) -> str:
    """Return counts, medians and the failures by cause."""
    ran = [record for record in done.values() if record["ran"]]
    failed = [record for record in done.values() if not record["ran"]]
    lines = [f"{len(done)} types, {sum(r['built'] for r in done.values())} built, {len(ran)} ran"]
    if ran:
        seconds = sorted(record["load_seconds"] for record in ran)
        lines.append(f"loading: median {seconds[len(seconds) // 2]:.2f} s, longest {seconds[-1]:.1f} s")
        partial = sum("no inputs of this kind" in " ".join(record["notes"]) for record in ran)
        lines.append(f"{partial} ran without some of their modalities")
    lines += _map_summary(ran)
    by_cause = collections.defaultdict(list)
    for record in failed:
        by_cause[cause(record["error"])].append(record["type"])
    lines += [f"{len(names):4}  {why}: {' '.join(names)}" for why, names in sorted(by_cause.items(), key=_size)]
    return "\n".join(lines)


def _size(item: tuple[str, list[str]]) -> int:
    return -len(item[1])


def _map_summary(ran: list[dict[str, Any]]) -> list[str]:
    mapped = [record for record in ran if "norm_modules" in record]
    lines = []
    for what, total in (("norm_modules_found", "norm_modules"), ("hand_written_verified", "hand_written")):
        all_of_them = sum(record[total] for record in mapped)
        if all_of_them:
            share = sum(record[what] for record in mapped) / all_of_them
            lines.append(f"{what}: {share:.2%} of {all_of_them} in {len(mapped)} types")
    if mapped:
        seconds = sorted(record["map_seconds"] for record in mapped)
        slow = sum(s > 1 for s in seconds)
        lines.append(
            f"map: median {seconds[len(seconds) // 2]:.3f} s, {slow} types over 1 s, longest {seconds[-1]:.1f} s"
        )
    for what, title in (
        ("loud", "with a finding above info"),
        ("broken_rules", "with a rule that failed"),
        ("changed", "left changed"),
    ):
        hit = [f"\n        {record['type']}: {'; '.join(record[what])}" for record in mapped if record.get(what)]
        lines.append(f"{len(hit)}  {title}{''.join(hit)}")
    lines.append(f"most passes of a check: {max((record.get('passes', 0) for record in mapped), default=0)}")
    errors = [record["type"] for record in ran if "map_error" in record]
    return lines + ([f"{len(errors)}  map failed: {' '.join(errors)}"] if errors else [])


def cause(error: str) -> str:
    """Return the kind of a failure; a process that died is named by how it ended."""
    for pattern, kind in _CAUSES:
        if found := re.search(pattern, error):
            return kind or found[0]
    return "cannot be built" if "cannot be built" in error else "cannot be fed"


_CAUSES = (
    (r"requires the|No module named|not installed|not found in your environment|pip install", "needs a package"),
    ("no model class of its own|no attribute 'modeling", "no class to run by itself"),
    ("has no forward|state of a running video", "cannot be called with tensors alone"),
    ("longer than", "too slow"),
    ("MemoryError|not enough memory|[Oo]ut of memory|can't allocate", "out of memory"),
    (r"the process (ended|was ended) .*", ""),
)


if __name__ == "__main__":
    sys.exit(main())
