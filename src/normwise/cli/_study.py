"""The command that runs studies."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from normwise.cli._options import debug, files, lang
from normwise.cli._output import COULD_NOT_RUN, aside, cleaned, no_collection, say
from normwise.errors import StudyError

if TYPE_CHECKING:
    from types import ModuleType

    from normwise.studies import Evidence

__all__ = ["study"]

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_ASKS = ("quick", "seeds", "ledger")
_RUNS = ("engine", "workers", "retries", "time_limit", "memory_limit")


def _bytes(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Read an amount of memory."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]+)", text.lower())
    if found is None or found[2] not in _UNITS or not 0 < float(found[1]) < float("inf"):
        raise click.BadParameter(f"{text!r} is no amount of memory: give one such as 2GB, 512MB or 1.5GiB.")
    return int(float(found[1]) * _UNITS[found[2]])


@click.command(short_help="Measure a claim of the field on small trainings, with a verdict.")
@click.argument("words", nargs=-1, metavar="[NAME | resume LEDGER | show LEDGER]")
@click.option("--quick", is_flag=True, help="The small set with one seed, under 5 CPU-minutes.")
@click.option("--seeds", type=click.IntRange(min=1), metavar="N", help="Of every trial.  [default: the study's own]")
@click.option("--engine", metavar="ENGINE", help="local (default), dask://HOST:PORT or slurm.")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Trials at once.  [default: all there are]")
@click.option(
    "--ledger",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Where results are kept.  [default: normwise-studies/NAME.sqlite]",
)
@click.option(
    "--retries", type=click.IntRange(min=0), metavar="N", help="Of a trial that gave no result.  [default: 1]"
)
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Of one trial.")
@click.option("--memory-limit", callback=_bytes, metavar="SIZE", help="Of one trial: 2GB.")
@click.option(
    "--format", "format_", metavar="FORMAT", help="What to print: text (default), markdown, html, json, jsonl, csv."
)
@files("normwise.studies.reports", "Also write: .html, .md, .txt, .json, .jsonl, .csv, .parquet. Repeatable.")
@lang
@debug
def study(words: tuple[str, ...], **given: Any) -> int:
    """Measure a claim of the field on small trainings, with the theory beside it and a verdict.

    \b
    normwise study                  list the studies and what they cost
    normwise study NAME             run what its ledger lacks, then judge
    normwise study resume LEDGER    run what is open in a ledger, then judge
    normwise study show LEDGER      judge what is there, run nothing; also a .jsonl that was written

    NAME is one of those that the list names. Each trial is a process of its own and is kept as soon as it ends:
    Ctrl-C or a killed process loses only what was running.

    Exit codes: 0 done; 2 could not run, or trials are left without a result.
    """
    match words:
        case ():
            _needless(given, (*_ASKS, *_RUNS, "outputs"), "needs the NAME of a study")
            return _list(given["format_"], given["lang"])
        case ("resume", ledger):
            _needless(given, _ASKS, "cannot be changed by resume, which runs what the ledger lacks: give NAME --ledger")
            return _run("resume", Path(ledger), given)
        case ("show", ledger):
            _needless(given, (*_ASKS, *_RUNS), "has no meaning with show, which runs nothing")
            return _run("show", Path(ledger), given)
        case (name,) if name not in ("resume", "show"):
            return _run("run", name, given)
    raise click.UsageError("Give NAME, or resume LEDGER, or show LEDGER.", click.get_current_context())


def _needless(given: dict[str, Any], names: tuple[str, ...], why: str) -> None:
    """Refuse options that would be ignored."""
    for name in names:
        if _is_given(given[name]):
            option = "-o" if name == "outputs" else f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} {why}.", click.get_current_context())


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and value != ()


def _list(format: str | None, lang: str) -> int:
    if format not in (None, "text", "json"):
        raise ValueError(f"no format of the list is called {format!r}: choose from text, json")
    with aside(), no_collection():
        from normwise import studies
        from normwise._parts import page_title
    parts = {name: studies.get(name) for name in studies.names()}
    rows = [
        {
            "name": name,
            "title": page_title(part, lang),
            "quick": _cost(name, part, True),
            "full": _cost(name, part, False),
        }
        for name, part in parts.items()
    ]
    say(json.dumps(rows, indent=2, ensure_ascii=False) if format == "json" else _table(rows, lang))
    return 0


def _cost(name: str, part: ModuleType, quick: bool) -> dict[str, float]:
    from normwise.studies._trials import asked, seconds

    trials = asked(name, part, quick=quick)
    return {"trials": len(trials), "cpu_minutes": round(sum(seconds(part, each.params) for each in trials) / 60, 1)}


_HEADINGS = {
    "en": ("study", "quick: trials", "CPU-minutes", "full: trials", "CPU-minutes", ""),
    "zh": ("研究", "快速：试验数", "CPU 分钟", "完整：试验数", "CPU 分钟", ""),
}


def _table(rows: list[dict[str, Any]], lang: str) -> str:
    from rich.cells import cell_len

    cells: list[tuple[str, ...]] = [_HEADINGS[lang]]
    for row in rows:
        costs = (f"{row[size][what]:g}" for size in ("quick", "full") for what in ("trials", "cpu_minutes"))
        cells.append((row["name"], *costs, row["title"]))
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    widths[-1] = 0  # nothing stands behind the titles
    padded = ([each + " " * (width - cell_len(each)) for each, width in zip(row, widths, strict=True)] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _run(how: str, what: Any, given: dict[str, Any]) -> int:
    """Run, resume or show; print what was found, then write the files."""
    with aside(), no_collection():
        from normwise.rendering import in_language
        from normwise.rendering.progress import progress
        from normwise.studies import _runner, reports
    format = "text" if given["format_"] is None else given["format_"]
    if format not in reports.names():
        raise ValueError(f"no format is called {format!r}: choose from {', '.join(reports.names())}")
    for path in given["outputs"]:
        reports.require(path)
    options = {name: given[name] for name in (*_ASKS, *_RUNS) if _is_given(given[name])}
    with aside():
        if how == "show":
            evidence = _runner.show(what)
        else:
            with progress() as bar:

                def advance(text: str, done: int, total: int) -> None:
                    bar(in_language(text, given["lang"]), done, total)

                def told(text: str) -> None:
                    _aside(in_language(text, given["lang"]))

                evidence = getattr(_runner, how)(what, advance=advance, told=told, **options)
    say(reports.render(evidence, format, lang=given["lang"]))  # not aside: colour is for a terminal at standard output
    for path in given["outputs"]:
        try:
            reports.save(evidence, path, lang=given["lang"])
        except OSError as error:
            kept = f": normwise study show {shlex.quote(str(evidence.ledger))} -o FILE" if evidence.ledger else ""
            raise StudyError(f"{path} cannot be written ({error.strerror}); write it elsewhere{kept}") from None
        _aside(f"wrote {path}")
    if evidence.finished:
        return 0
    _aside(f"normwise: {in_language(_unfinished(evidence), given['lang'])}")
    return COULD_NOT_RUN


def _aside(line: str) -> None:
    click.echo(cleaned(line), err=True)


def _unfinished(evidence: Evidence) -> str:
    """Say what has no result, why, and how to go on."""
    from normwise.rendering import both

    failed = [trial for trial in evidence.unrun if trial.error]
    count, total = len(evidence.unrun), len(evidence.unrun) + len(evidence.rows)
    en = f"{count} of {total} trials {'has' if count == 1 else 'have'} no result"
    zh = f"{total} 个试验中有 {count} 个没有结果"
    if failed:
        params = ", ".join(f"{name} {value}" for name, value in failed[0].params.items())
        why = failed[0].error.partition("\n")[0]
        en += f", {len(failed)} of them after an error; the first ({params}): {why}"
        zh += f"，其中 {len(failed)} 个出错；第一个（{params}）：{why}"
    if evidence.ledger is None:
        return both(
            f"{en}; this is an export, resume the ledger that it came from",
            f"{zh}；这是导出文件，请续跑原账本",
        )
    dash = "-- " * str(evidence.ledger).startswith("-")
    command = f"normwise study resume {dash}{shlex.quote(str(evidence.ledger))}"
    return both(f"{en}; run them with: {command}", f"{zh}；续跑：{command}")
