"""The command that converts models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from normwise.cli._options import debug, lang
from normwise.cli._output import aside, cleaned, no_collection, say, say_json

if TYPE_CHECKING:
    from normwise.conversions import Plan

__all__ = ["convert"]

REFUSED = 1


def _pairs(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """Read ``key=value``; numbers and true or false are what they look like."""
    found = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text} is not of the form key=value.")
        try:
            found[key.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[key.replace("-", "_")] = value
    return found


@click.command(short_help="Change the norms of a model and prove that nothing else changed.")
@click.argument("words", nargs=-1, required=True, metavar="NAME TARGET | plan [NAME] TARGET | verify A B")
@click.option("-o", "out", type=click.Path(path_type=Path), metavar="OUT", help="Folder, or FILE.safetensors.")
@click.option("--weightless", is_flag=True, help="rms-norm, fold-affine: leave no gain and bias in the norm.")
@click.option("--fold-bias", is_flag=True, help="rms-norm: fold the bias into what reads the norm.")
@click.option("--untie", is_flag=True, help="Give a tied head its own matrix, where that is needed.")
@click.option("--consent", multiple=True, metavar="WHAT", help="Outputs that may change: hidden-states. Repeatable.")
@click.option("--option", "options", multiple=True, callback=_pairs, metavar="KEY=VALUE", help="Any other option.")
@click.option(
    "--format", "format_", metavar="FORMAT", help="stock, code, manifest or safetensors.  [default: what fits]"
)
@click.option("--force", is_flag=True, help="Replace OUT as a whole.")
@click.option("--no-verify", is_flag=True, help="Leave the verification out; the report says so.")
@click.option("--inputs", metavar="SPEC", help="Shapes of the inputs, as of check.")
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16", "float64"]), help="Convert a copy in this."
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@lang
@debug
def convert(words: tuple[str, ...], **given: Any) -> int:
    """Change the norms of a model and prove that nothing else changed.

    \b
    normwise convert NAME TARGET -o OUT    convert TARGET by NAME, prove it, write OUT
    normwise convert plan [NAME] TARGET    say what would change; the weights of a large folder are not read
    normwise convert verify A B            run two models in float64 on the same inputs and compare

    NAME is rms-norm, fold-affine, fold-batch-norm, swap-layers, unit-offset or another conversion; the guide has a
    page on each. TARGET is as for `normwise check`; of a folder (hf:DIR) it is converted tensor by tensor, and never
    written to.

    Exit codes: 0 done, or the same; 1 refused, or different; 2 could not run.
    """
    options = dict(given["options"])
    options |= dict.fromkeys((name for name in ("weightless", "fold_bias", "untie") if given[name]), True)
    options |= {"consent": given["consent"]} if given["consent"] else {}
    with aside(), no_collection():
        from normwise.errors import ConversionRefused
    try:
        match words:
            case ("plan", target):
                return _plan(None, target, options, given)
            case ("plan", name, target):
                return _plan(name, target, options, given)
            case ("verify", first, second):
                return _verify(first, second, given)
            case (name, target) if name not in ("plan", "verify"):
                return _convert(name, target, options, given)
    except ConversionRefused as refusal:
        _refuse(refusal.reasons, as_json=given["as_json"])
        return REFUSED
    raise click.UsageError("Give NAME TARGET, or plan [NAME] TARGET, or verify A B.", click.get_current_context())


def _plan(name: str | None, target: str, options: dict[str, Any], given: dict[str, Any]) -> int:
    with aside(), no_collection():
        from normwise.conversions import _plan_report
        from normwise.conversions.saving.running import plans
        from normwise.rendering.progress import progress
    with aside(), progress() as advance:
        made = plans(name, target, inputs=given["inputs"], dtype=given["dtype"], options=options, advance=advance)
    if given["as_json"]:
        listed = [plan.to_json() for plan in made]
        say_json(listed[0] if name else listed)
    else:
        say("\n".join(_plan_report.text(plan, target, lang=given["lang"]) for plan in made))
    return 0 if any(plan.changes for plan in made) else REFUSED


def _verify(first: str, second: str, given: dict[str, Any]) -> int:
    with aside(), no_collection():
        from normwise.conversions.saving.running import compare
        from normwise.rendering import both, in_language
    with aside():
        found = compare(first, second, inputs=given["inputs"])
    if given["as_json"]:
        say_json(found)
    else:
        verdict = both("the same", "相同") if found["same"] else both("NOT the same", "不相同")
        gap, rounding = f"{found['gap']:.2g}", f"{found['rounding']:.2g}"
        said = both(
            f"{verdict}: in float64 the outputs differ by {gap} of their largest entry; rounding the weights once"
            f" changes {rounding}",
            f"{verdict.zh}：float64 下输出之差为其最大元素的 {gap}；权重舍入一次带来的变化为 {rounding}",
        )
        say(in_language(said, given["lang"]))
        for name, apart in found["outputs"].items():
            say(f"  {cleaned(name)}  {apart:.2g}")
    return 0 if found["same"] else REFUSED


def _convert(name: str, target: str, options: dict[str, Any], given: dict[str, Any]) -> int:
    if given["out"] is None:
        raise click.UsageError("Missing option '-o OUT'.", click.get_current_context())
    with aside(), no_collection():
        from normwise.conversions import _plan_report
        from normwise.conversions.saving.report import text
        from normwise.conversions.saving.running import run
        from normwise.rendering import both, in_language
        from normwise.rendering.progress import progress
    seen: list[Plan] = []
    asked = {key: given[key] for key in ("inputs", "dtype", "force")}
    with aside(), progress() as advance:
        report = run(
            name, target, given["out"], format=given["format_"], verify=not given["no_verify"], options=options,
            planned=seen.append, advance=advance, **asked,
        )  # fmt: skip
    if given["as_json"]:
        say_json(report)
    elif report.get("already"):
        name, target = report["conversion"], cleaned(target)
        said = both(
            f"{target} was converted by {name} already: nothing was done", f"{target} 已由 {name} 转换过：没有改动"
        )
        say(in_language(said, given["lang"]))
    else:
        for plan in seen:
            say(_plan_report.text(plan, target, lang=given["lang"]))
        notes = [note for plan in seen for note in plan.notes]
        say("\n" + text(report, given["out"], told=notes, lang=given["lang"]))
    return 0


def _refuse(reasons: tuple[str, ...], *, as_json: bool) -> None:
    if as_json:
        say_json({"refused": reasons})
        return
    click.echo(f"normwise: refused, for {len(reasons)} reason{'s' * (len(reasons) > 1)}", err=True)
    for reason in reasons:
        click.echo(f"  {cleaned(reason)}", err=True)
