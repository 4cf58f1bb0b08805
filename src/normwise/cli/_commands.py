"""The commands that examine models, and the rules and benchmarks."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from normwise.cli._convert import convert
from normwise.cli._options import configuration, debug, files, lang, loading, rendering, split
from normwise.cli._output import COULD_NOT_RUN, aside, cleaned, no_collection, say
from normwise.cli._study import study

if TYPE_CHECKING:
    from types import ModuleType

    from normwise.checkup.baseline import Baseline
    from normwise.checkup.configuration import Configuration
    from normwise.checkup.report import Report

__all__ = ["commands"]


class _Commands(click.Group):
    """Lists its commands in the order of use, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as they were added."""
        return list(self.commands)


def _version(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Print the version, and what computes norms here."""
    if asked:
        from importlib.metadata import version

        say(f"normwise {version('normwise')}")
        say(cleaned(_kernels()))
        ctx.exit()


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, nothing found at or above --fail-on; 1 findings, refused; 2 could not run.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version and exit."
)
@debug
@click.pass_context
def commands(ctx: click.Context) -> int:
    """Find every normalization in a PyTorch model, and what is wrong with it.

    Start with `normwise check`: it needs nothing and examines a small built-in model.
    """
    if ctx.invoked_subcommand is None:
        say(ctx.get_help())
        say(f"\n  {cleaned(_kernels())}")  # after the help, which need not wait for torch
    return 0


@commands.command()
@click.argument("target", required=False)
@loading
@click.option(
    "--select", multiple=True, callback=split, metavar="RULES", help="Run these only: codes, names or families."
)
@click.option("--ignore", multiple=True, callback=split, metavar="RULES", help="Leave these out.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "info", "never"]),
    help="Exit with 1 from this severity on.  [default: error]",
)
@click.option(
    "--effort",
    type=click.Choice(["read", "normal", "full"]),
    default="normal",
    show_default=True,
    help="read: one run of the model; normal: at most 15.",
)
@configuration
@rendering
def check(
    target: str | None,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str | None,
    effort: str,
    **options: Any,
) -> int:
    """Map the norms of TARGET and judge them by every rule.

    \b
    TARGET is one of
      hf:TYPE              a transformers architecture, small, with random weights
      hf:DIR               a local folder with config.json
      timm:NAME            a timm architecture with random weights
      FILE.onnx            an ONNX model; also FILE.pt2, an exported program of torch
      FILE.safetensors     weights without their model; also an index of shards, DIR, .pt, .bin, .ckpt
      FILE.py:callable     yours: returns a model, or (model, inputs)
      package.module:callable
      pkg:NAME             a package that ships real weights
      demo:NAME            built in; without TARGET: the demo with planted faults
    """
    settings, known = _settings(options)
    if target is None:
        click.echo("no target given: this is the built-in demo; `normwise check --help` shows what else", err=True)
    with aside():
        loaded = _load(target or "", options)
        from normwise import checkup
        from normwise.checkup.suppression import quieted

        asked = {"select": select or None, "ignore": ignore or None, "effort": effort}
        report = checkup.check(loaded, **asked, configuration=replace(settings, baseline=None))
    if known is not None:
        known = known.updated(report) if options["write_baseline"] else known
        report = quieted(report, known.suppressions(report.target))
    report = replace(report, call=_command(target, options, effort))
    _deliver(report, options)
    if known is not None and options["write_baseline"]:
        known.write()
        click.echo(cleaned(f"wrote {known.path}"), err=True)
    return _exit_code(report, fail_on or settings.fail_on)


@commands.command("map")
@click.argument("target")
@loading
@rendering
def map_(target: str, **options: Any) -> int:
    """Map the norms of TARGET without judging them."""
    from normwise import checkup

    with aside():
        report = checkup.map(_load(target, options))
    _deliver(report, options)
    return _exit_code(report, "never")


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@lang
@debug
def rules(as_json: bool, lang: str) -> int:
    """List the rules."""
    rows = [_rule_row(name, part, lang) for name, part in _rules_by_code()]
    if as_json:
        say(json.dumps(rows, indent=2))
        return 0
    widths = [max(len(row[key]) for row in rows) for key in ("code", "name", "severity")]
    for row in rows:
        say("  ".join([*map(str.ljust, list(row.values())[:3], widths), row["title"]]))
    return 0


@commands.command()
@click.argument("rule", metavar="CODE|NAME")
@lang
@debug
def explain(rule: str, lang: str) -> int:
    """Print the page of a rule: what it finds, why it matters, how to fix it."""
    from normwise._parts import page

    name, part = _find_rule(rule)
    say(f"{part.CODE} {name} ({part.SEVERITY})\n\n{page(part, lang)}\n\nsource: {part.__file__}")
    return 0


commands.add_command(convert)
commands.add_command(study)


@commands.command()
@click.argument("name", required=False)
@click.option("--quick", is_flag=True, help="Fewer shapes and rounds, under a minute.")
@click.option(
    "--threads",
    type=int,
    multiple=True,
    metavar="N",
    help="Threads of torch; repeatable, one run each.  [default: all]",
)
@click.option("--shape", "shapes", multiple=True, metavar="SHAPE", help="Of the input: 4096x1024. Repeatable.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["float32", "float16", "bfloat16", "float64"]),
    help="Of input and parameters. Repeatable.",
)
@click.option("--device", metavar="DEVICE", default="cpu", show_default=True, help="Run there: cpu, cuda, cuda:1, ...")
@click.option("--eager", is_flag=True, help="Time our kernel of plain torch too.")
@click.option("--format", "format_", metavar="FORMAT", help="What to print: text (default), json or svg.")
@files("normwise.benchmarks", "Also write the figures: .txt, .json or .svg, a bar chart. Repeatable.")
@lang
@debug
def bench(name: str | None, outputs: tuple[Path, ...], format_: str | None, lang: str, **options: Any) -> int:
    """Time our norms beside everybody's; checks them first.

    \b
    NAME is one of
      norms                RMSNorm and LayerNorm, plain and with a residual (default)
      small                the same on few rows: what a call costs
      batch-norm           BatchNorm2d in training, and GroupNorm
      conversions          whole models: as they are, with our layers, converted to RMSNorm
      llama                a training step of a small Llama, its norms swapped for ours

    Rivals take turns in one run: torch.nn, torch.compile of it, the class of transformers, ONNX Runtime, and a copy
    of the input as the limit. Nothing is timed if one of our results is wrong.
    """
    with aside(), no_collection():
        from normwise import benchmarks
    if format_ not in (None, *benchmarks.formats()):
        raise ValueError(f"no format is called {format_!r}: choose from {', '.join(benchmarks.formats())}")
    with aside(), benchmarks.progress() as advance:
        result = benchmarks.run(name or benchmarks.DEFAULT, advance=advance, **options)
    if not result.rows:
        raise KeyboardInterrupt
    say(benchmarks.render(result, format_ or "text", lang=lang))
    if not result.finished:
        click.echo("normwise: interrupted, what was measured until then is above; nothing was written", err=True)
        return COULD_NOT_RUN
    for path in outputs:
        benchmarks.save(result, path, lang=lang)
        click.echo(cleaned(f"wrote {path}"), err=True)
    return 0


def _settings(options: dict[str, Any]) -> tuple[Configuration, Baseline | None]:
    """Return the configuration, and the baseline it or the command line names, read before anything is loaded."""
    if options["isolated"] and options["config"]:
        raise click.UsageError("--isolated reads no configuration, --config names one: leave one of them out.")
    with no_collection():
        from normwise.checkup import baseline
        from normwise.checkup import configuration as configurations

    settings = configurations.Configuration() if options["isolated"] else None
    settings = settings or (configurations.read(options["config"]) if options["config"] else configurations.nearest())
    path, write = options["baseline"] or settings.baseline, options["write_baseline"]
    if path is None and write:
        raise click.UsageError("--write-baseline needs the file: give --baseline FILE.")
    return settings, None if path is None else baseline.read(path, missing=write)


def _load(target: str, options: dict[str, Any]) -> Any:
    with no_collection():
        from normwise import targets
        from normwise.checkup import reports

        if options["format_"] not in (None, *reports.names()):
            raise ValueError(f"no format is called {options['format_']!r}: choose from {', '.join(reports.names())}")
        return targets.load(target, inputs=options["inputs"], dtype=options["dtype"], device=options["device"])


def _deliver(report: Report, options: dict[str, Any]) -> None:
    """Print the report, then write its files: what was found is seen even if a disk is full."""
    from normwise.checkup import reports

    chosen = {"lang": options["lang"], "full": options["full"]}
    say(reports.render(report, options["format_"] or "text", **chosen))
    for path in options["outputs"]:
        reports.save(report, path, **chosen)
        click.echo(cleaned(f"wrote {path}"), err=True)


def _command(target: str | None, options: dict[str, Any], effort: str) -> str:
    """Return the line that makes the same check again, whatever it selects and shows."""
    given = {"inputs": options["inputs"], "dtype": options["dtype"], "device": options["device"]}
    given["effort"] = effort if effort != "normal" else None
    said = [word for option, value in given.items() if value is not None for word in (f"--{option}", value)]
    return shlex.join(["normwise", "check", *([] if target is None else [target]), *said])


def _kernels() -> str:
    """Say which of our kernels runs here, and why not the others."""
    with aside(), no_collection():
        from normwise import benchmarks, kernels

        return benchmarks.kernels_line(kernels.backends())


def _exit_code(report: Report, fail_on: str) -> int:
    worst = report.worst()
    failed = worst is not None and worst.reaches(fail_on)
    if report.inputs == "none" and not report.checkpoint_only and not failed:
        hint = "give --inputs SHAPE (2x12:long, ids=2x12:long) or return (model, inputs)"
        click.echo(
            cleaned(f"normwise: {report.target}: the model was not run, no inputs could be inferred; {hint}"), err=True
        )
        return COULD_NOT_RUN
    return int(failed)


def _rules_by_code() -> list[tuple[str, ModuleType]]:
    from normwise.checkup import rules

    return sorted(rules.all_rules().items(), key=lambda item: item[1].CODE)


def _rule_row(name: str, part: ModuleType, lang: str) -> dict[str, str]:
    from normwise._parts import page_title

    return {"code": part.CODE, "name": name, "severity": str(part.SEVERITY), "title": page_title(part, lang)}


def _find_rule(text: str) -> tuple[str, ModuleType]:
    from normwise.checkup.rule import unknown

    parts = _rules_by_code()
    wanted = text.lower().replace("_", "-")
    for name, part in parts:
        if wanted in (name, part.CODE.lower()):
            return name, part
    raise unknown(dict(parts), text)
