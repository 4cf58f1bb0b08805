"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

__all__ = ["configuration", "debug", "files", "lang", "loading", "rendering", "split", "stack"]


def split(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def _writable(package: str) -> Callable[[click.Context, click.Parameter, tuple[Path, ...]], tuple[Path, ...]]:
    """Return what refuses, before anything runs, files that the package could not write."""

    def refuse(ctx: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        if not paths:
            return paths
        from normwise.rendering.files import suffix

        suffixes = sorted(import_module(package).suffixes())
        for path in paths:
            if suffix(path, suffixes) is None:
                raise click.BadParameter(f"{path} names no report format: let it end in {', '.join(suffixes)}.")
            if not path.parent.is_dir():
                raise click.BadParameter(f"the folder of {path} does not exist: create {path.parent} first.")
            if not os.access(path.parent, os.W_OK):
                raise click.BadParameter(f"the folder of {path} cannot be written to: choose another.")
        return paths

    return refuse


def stack(*decorators: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(command: Any) -> Any:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def files(package: str, help: str) -> Callable[[Any], Any]:
    of_files = click.Path(dir_okay=False, path_type=Path)
    return click.option(
        "-o", "outputs", multiple=True, metavar="FILE", type=of_files, callback=_writable(package), help=help
    )


debug = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of a failure.")
loading = stack(
    click.option(
        "--inputs", metavar="SPEC", help="Shapes of the inputs: 2x3x64x64, 2x12:long, ids=2x12:long,mask=2x12:bool."
    ),
    click.option(
        "--dtype", type=click.Choice(["float32", "float16", "bfloat16", "float64"]), help="Run a copy in this."
    ),
    click.option("--device", metavar="DEVICE", help="Run there: cpu, cuda, cuda:1, ..."),
)
configuration = stack(
    click.option(
        "--config",
        metavar="FILE",
        help="Read [tool.normwise] of this file.  [default: of the nearest pyproject.toml that has it]",
    ),
    click.option("--isolated", is_flag=True, help="Read no configuration."),
    click.option("--baseline", metavar="FILE", help="Keep the findings of this file quiet: only new ones fail."),
    click.option("--write-baseline", is_flag=True, help="Put the findings of this check into the baseline."),
)
lang = click.option(
    "--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True, help="English or Chinese."
)
rendering = stack(
    click.option(
        "--format",
        "format_",
        metavar="FORMAT",
        help="What to print: text (default), json, html, markdown, sarif, github or junit.",
    ),
    files(
        "normwise.checkup.reports",
        "Also write the report; the suffix chooses its format: .txt, .json, .html, .md, .sarif or .xml. Repeatable.",
    ),
    lang,
    click.option("--full", is_flag=True, help="Show every block, also repeated ones; in SARIF every rule."),
    debug,
)
