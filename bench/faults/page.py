"""The page of the benchmark, made from its results in two languages, and the summary for a terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.faults.known import MISSES, SURPRISES, SURPRISES_OF_BFLOAT16
from bench.faults.words import CHINESE, ENGLISH, Words

__all__ = ["CHINESE", "ENGLISH", "Figures", "figures", "page", "summary", "unexplained"]

Record = dict[str, Any]


class Figures:
    """What a set of alive trials amounts to."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        self.alive = [r for r in self.records if r["status"] == "alive"]
        self.equivalent = sum(r["status"] == "equivalent" for r in self.records)
        self.found = sum(r["found"] for r in self.alive)
        self.right = sum(r["right"] for r in self.alive)
        self.false = sum(len(_besides(r)) for r in self.alive)
        self.detector = [sum(r["detector"][i] for r in self.alive) for i in (0, 1)]
        self.anomaly = [sum(r["anomaly"][i] for r in self.alive) for i in (0, 1)]
        seconds = sorted(r["seconds"] for r in self.alive)
        self.seconds = seconds[len(seconds) // 2] if seconds else 0.0

    @property
    def recall(self) -> float:
        """The share of alive faults that were found."""
        return self.found / len(self.alive) if self.alive else 0.0

    @property
    def placed(self) -> float:
        """The share of the found ones whose module is right."""
        return self.right / self.found if self.found else 0.0

    @property
    def precision(self) -> float:
        """The share of findings above info on faulty models that the fault explains."""
        return self.found / (self.found + self.false) if self.found else 0.0


def figures(records: Sequence[Record]) -> tuple[Figures, dict[str, Figures], dict[str, Figures]]:
    """Return the figures of all trials, those of each rule, and those of each fault."""
    from bench.faults.injectors import FAULTS

    injected = [r for r in records if r["fault"] in FAULTS]
    by_rule: dict[str, list[Record]] = defaultdict(list)
    by_fault: dict[str, list[Record]] = defaultdict(list)
    for record in injected:
        by_rule[FAULTS[record["fault"]].codes[0]].append(record)
        by_fault[record["fault"]].append(record)
    return Figures(injected), _of(dict(sorted(by_rule.items()))), _of({f: by_fault[f] for f in FAULTS if f in by_fault})


def _of(groups: Mapping[str, list[Record]]) -> dict[str, Figures]:
    return {name: Figures(group) for name, group in groups.items()}


def unexplained(records: Sequence[Record]) -> list[Record]:
    """Return the healthy models with a finding above info that is no listed true surprise."""
    return [r for r in records if r["status"] == "healthy" and _besides(r)]


def _besides(record: Record) -> list[list[str]]:
    """Return the findings that nothing explains, without the listed true surprises."""

    def listed(code: str) -> bool:
        half = record["dtype"] == "bfloat16" and code in SURPRISES_OF_BFLOAT16
        return half or (record["architecture"], code) in SURPRISES

    return [other for other in record["others"] if not listed(other[0])]


def summary(records: Sequence[Record]) -> str:
    """Return the figures as plain text, with what was missed and what was said besides."""
    total, rules, _ = figures(records)
    states = Counter(r["status"] for r in records)
    lines = [
        ", ".join(f"{n} {state}" for state, n in sorted(states.items())),
        f"recall {total.recall:.1%} of {len(total.alive)}, right module {total.placed:.1%}, "
        f"precision {total.precision:.1%}, median {total.seconds:.2f} s a check",
        f"detector {total.detector}, anomaly mode {total.anomaly}",
    ]
    lines += [
        f"{code}: {f.found}/{len(f.alive)} found, {f.right} right, {f.false} false, {f.equivalent} equivalent"
        for code, f in rules.items()
    ]
    for record in records:
        name = f"{record['architecture']}/{record['fault']}"
        if record["status"] == "failed":
            lines.append(f"FAILED {name}: {record['why']}")
        elif record["status"] == "alive" and not (record["found"] and record["right"] and not _besides(record)):
            state = "missed" if not record["found"] else "misplaced" if not record["right"] else "false"
            lines.append(f"{state} {name} {record['at']} {record['others'] or ''}{' (info)' * record['whispered']}")
        elif record["status"] == "replayed" and not record["first"]:
            lines.append(f"not first {name}")
    lines += [f"ALARM {r['architecture']}/{r['setting']}/{r['dtype']}: {r['others']}" for r in unexplained(records)]
    return "\n".join(lines)


def page(records: Sequence[Record], words: Words) -> str:
    """Return the page."""
    total, rules, faults = figures(records)
    healthy = [r for r in records if r["status"] == "healthy"]
    replayed = [r for r in records if r["status"] == "replayed"]
    architectures = {r["architecture"] for r in total.alive}
    numbers = {
        "alive": len(total.alive), "equivalent": total.equivalent, "faults": len(faults), "rules": len(rules),
        "architectures": len(architectures), "recall": _percent(total.recall), "placed": _percent(total.placed),
        "precision": _percent(total.precision), "seconds": f"{total.seconds:.2f}", "false": total.false,
        "detector": _percent(total.detector[0] / max(len(total.alive), 1)),
        "detector_right": total.detector[1], "detector_found": total.detector[0],
        "anomaly": _percent(total.anomaly[0] / max(len(total.alive), 1)),
        "anomaly_right": total.anomaly[1], "anomaly_found": total.anomaly[0],
        "healthy": len(healthy), "zoo": len({r["architecture"] for r in healthy}),
        "alarms": len(unexplained(records)), "surprised": sum(bool(r["others"]) for r in healthy),
        "replayed": len(replayed), "first": sum(r["first"] for r in replayed),
        "twins": sum(bool(r["others"]) for r in replayed),
        "replay_detector": sum(r["detector"][0] for r in replayed),
        "replay_anomaly": sum(r["anomaly"][0] for r in replayed),
    }  # fmt: skip
    text = words.page.format(**numbers)
    tables: dict[str, Callable[[], str]] = {
        "RULES": lambda: _rules(rules, total, words),
        "FAULTS": lambda: _faults(faults, words),
        "MISSES": lambda: _misses(total, words),
        "FALSE": lambda: _false(total, words),
    }
    for mark, table in tables.items():
        text = text.replace(f"<<{mark}>>", table())
    return text


def _percent(share: float) -> str:
    return f"{share:.1%}".replace(".0%", "%")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(str(cell) for cell in row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _rules(rules: Mapping[str, Figures], total: Figures, words: Words) -> str:
    rows = [(f"[{code}](rules/{code}{words.suffix}.md)", *_row(f)) for code, f in rules.items()]
    return _table(words.rules, [*rows, (words.all, *_row(total))])


def _row(f: Figures) -> tuple[object, ...]:
    alive = len(f.alive)
    if not alive:
        return (0, f.equivalent, "", "", "", "", "", "")
    return (
        alive, f.equivalent, _percent(f.recall), _percent(f.placed) if f.found else "", f.false,
        f"{f.seconds:.2f}", _percent(f.detector[0] / alive), _percent(f.anomaly[0] / alive),
    )  # fmt: skip


def _faults(faults: Mapping[str, Figures], words: Words) -> str:
    from bench.faults.injectors import FAULTS

    rows = []
    for name, f in faults.items():
        fault = FAULTS[name]
        level = words.information if fault.information else ""
        codes = ", ".join(fault.codes)
        rows.append((f"`{name}`", fault.what[words.index], codes + level, len(f.alive), f.equivalent, f.found, f.right))
    return _table(words.faults, rows)


def _misses(total: Figures, words: Words) -> str:
    missed: dict[str, list[str]] = defaultdict(list)
    for record in total.alive:
        if not record["found"]:
            missed[record["fault"]].append(record["architecture"])
    rows = [
        (f"`{fault}`", ", ".join(f"`{a}`" for a in where), MISSES[fault][words.index] if fault in MISSES else "")
        for fault, where in missed.items()
    ]
    return _table(words.misses, rows)


def _false(total: Figures, words: Words) -> str:
    rows = [
        (f"`{r['fault']}`", f"`{r['architecture']}`", ", ".join(f"{c} {s} `{p}`" for c, s, p in said))
        for r in total.alive
        if (said := _besides(r))
    ]
    return _table(words.false, rows) if rows else words.nothing
