"""From a TARGET to a plan, or to an output on disk: what ``normwise convert`` does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normwise import conversions
from normwise.conversions._converted import Converted
from normwise.conversions._plan import Plan
from normwise.conversions._targets import loaded
from normwise.conversions.proof import prove
from normwise.conversions.proof.compare import gap, ratios
from normwise.conversions.proof.double import doubled
from normwise.conversions.proof.subject import EXACT, run_copy
from normwise.conversions.proof.twin import free_memory
from normwise.conversions.saving import formats
from normwise.conversions.saving.checkpoint import Checkpoint
from normwise.conversions.saving.loading import load, read_manifest
from normwise.conversions.saving.names import StoredOtherwise
from normwise.conversions.saving.publishing import check_output
from normwise.conversions.saving.report import read_report
from normwise.conversions.saving.save import Advance, convert_checkpoint, save_converted
from normwise.errors import ConversionRefused, TargetError
from normwise.facts.facts import Facts
from normwise.targets import Target, Weights, folder
from normwise.targets.hf_build import build_fake
from normwise.targets.hf_inputs import one_line

__all__ = ["compare", "plans", "run"]

_ROUNDINGS = 4
_COPIES = 4  # of the weights while a conversion is proved: the original, the copy, the reloaded one, and headroom


def plans(
    name: str | None,
    text: str,
    *,
    inputs: str | None = None,
    dtype: str | None = None,
    options: Mapping[str, Any],
    advance: Advance = lambda text, done, total: None,
) -> list[Plan]:
    """Plan a conversion of a TARGET, or every one; the weights of a large folder are not read.

    Args:
        name: of the conversion; None for all that change something.
        text: the TARGET.
        inputs: a shape, see ``targets.load``.
        dtype: what a copy is cast to first.
        options: of the conversion.
        advance: is told what is done.

    Raises:
        ConversionRefused: the folder was written by a conversion itself.
        TargetError: the target cannot be loaded.
        ValueError: no such conversion, or an option it does not take.
    """
    names = conversions.names() if name is None else (name,)
    if name is not None:
        conversions.check_options(name, options)
    source = _source(text)
    _written_by(source)
    advance("loading", 0, 0)
    facts = Facts(loaded(text, inputs=inputs, dtype=dtype, weights=False), effort="full")
    made = []
    for each in names:
        advance(f"planning {each}", 0, 0)
        made.append(conversions.get(each).plan(facts, **options))
    return made if name is not None else [plan for plan in made if plan.changes] or made


def run(
    name: str,
    text: str,
    out: Path,
    *,
    inputs: str | None = None,
    dtype: str | None = None,
    format: str | None = None,
    force: bool = False,
    verify: bool = True,
    options: Mapping[str, Any],
    planned: Callable[[Plan], object] = lambda plan: None,
    advance: Advance = lambda text, done, total: None,
) -> dict[str, Any]:
    """Convert what a TARGET names and save it; a folder tensor by tensor, where it stores them as the model holds them.

    A model too large for its proof in memory is planned without its weights: its twin is proved, and what was written
    is not loaded again. What was converted before is left alone: its report is returned with "already".

    Args:
        name: of the conversion.
        text: the TARGET.
        out: a folder, or a file that ends in .safetensors.
        inputs: see ``plans``.
        dtype: see there.
        format: of ``normwise.conversions.saving.formats``.
        force: replace what is there.
        verify: False leaves out the proof of a folder, and loading the result again of anything.
        options: of the conversion.
        planned: is told the plan before anything is written.
        advance: is told what is done.

    Raises:
        ConversionRefused: nothing can be converted, the proof failed, or the format cannot hold the result.
        TargetError: the target cannot be loaded.
        ValueError: of an option, or of the output, see ``publishing.check_output``.
    """
    conversion = conversions.check_options(name, options)
    if format is not None:
        formats.get(format)
    source = _source(text)
    before = _written_by(source, but=name)
    if before is not None:
        return {**before, "already": True}
    check_output(out, () if source is None else (source,), force=force)
    advance("loading", 0, 0)
    target = loaded(text, inputs=inputs, dtype=dtype, weights=source is None or (verify and _fits(source)))
    advance("planning", 0, 0)
    saving: dict[str, Any] = {"format": format, "force": force, "advance": advance}
    if target.weights is not Weights.FAKE and (verify or source is None):
        converted = conversions.convert(name, target, **options)
        planned(converted.plan)
        if source is not None and dtype is None:
            with suppress(StoredOtherwise):
                return convert_checkpoint(
                    converted.plan, source, out, model=target.model, converted=converted, **saving
                )
        return save_converted(converted, out, verify=verify, **saving)
    if source is None:
        raise ConversionRefused([f"{text}: the model holds no numbers, and there are no shards to convert"])

    def replan(other: Target) -> Plan:
        return conversion.plan(Facts(other, effort="full"), **options)

    facts = Facts(target, effort="full")
    plan = conversion.plan(facts, **options)
    conversions.check_changes(plan)
    planned(plan)
    proved = _proved_without_weights(plan, target, facts, replan) if verify else None
    return convert_checkpoint(plan, source, out, model=target.model, converted=proved, verify=False, **saving)


def compare(first: str, second: str, *, inputs: str | None = None) -> dict[str, Any]:
    """Run two models in float64 on the same inputs, those of the first, and say how far their outputs are apart.

    Stored weights were rounded to their dtype, so an exact conversion differs by what such a rounding changes; that is
    measured, on the first model with its weights moved by at most half a unit in the last place.

    Args:
        first: a TARGET, or a folder that ``normwise.load`` opens.
        second: the same.
        inputs: a shape, see ``targets.load``.

    Returns:
        "gap" (the largest, relative to the largest entry of an output), "outputs" (the gap of each), "rounding" (what
        one rounding changes), and "same": the gap is at most 4 times that, or 1e-10.

    Raises:
        TargetError: one cannot be loaded.
        ConversionRefused: they do not return the same outputs.
    """
    target, other = _opened(first, inputs), _opened(second, inputs)
    ours, noisy = (run_copy(model, target) for model in (target.model, _rounded_anew(target.model)))
    try:
        theirs = run_copy(other.model, target)
    except Exception as error:  # whatever the code of a model raises
        raise TargetError(f"{second} does not take the inputs of {first}: {one_line(error)}") from error
    if ours.keys() != theirs.keys():
        only = {first: ours.keys() - theirs.keys(), second: theirs.keys() - ours.keys()}
        said = [f"{text} alone returns {', '.join(sorted(names))}" for text, names in only.items() if names]
        raise ConversionRefused([f"not comparable: {'; '.join(said)}"])
    apart, noise = gap(ours, theirs), gap(ours, noisy)
    same = apart <= max(EXACT, _ROUNDINGS * noise)
    return {
        "first": first,
        "second": second,
        "same": same,
        "gap": apart,
        "rounding": noise,
        "outputs": ratios(ours, theirs),
    }


def _rounded_anew(model: nn.Module) -> nn.Module:
    """Return a float64 copy whose weights are others that might have been rounded to the same dtype."""
    generator = torch.Generator().manual_seed(0)
    moved = doubled(copy.deepcopy(model))
    with torch.no_grad():
        for old, new in zip(model.parameters(), moved.parameters(), strict=True):
            if old.is_floating_point():
                half = torch.finfo(old.dtype).eps / 2
                new *= 1 + half * (2 * torch.rand(new.shape, generator=generator, dtype=new.dtype) - 1)
    return moved


def _opened(text: str, inputs: str | None) -> Target:
    source = _source(text)
    if source is None or read_manifest(source) is None:
        return loaded(text, inputs=inputs)
    from normwise.targets.hf_inputs import find_inputs

    model = load(source)
    return Target(model=model, name=text, kwargs=find_inputs(model).kwargs, weights=Weights.REAL)


def _source(text: str) -> Path | None:
    return Path(text.removeprefix("hf:")).expanduser() if folder.claims(text) else None


def _written_by(source: Path | None, but: str = "") -> dict[str, Any] | None:
    """Return the report of a folder that this conversion wrote; refuse one that the class misreads."""
    report = None if source is None else read_report(source)
    if report is None:
        return None
    if report["conversion"] == but.lower().replace("_", "-"):
        return report
    if report["format"] != "stock":
        raise ConversionRefused([f"{source} was written by {report['conversion']} already; convert the original"])
    return None


def _fits(source: Path) -> bool:
    free = free_memory()
    return free is None or _COPIES * Checkpoint.open(source).size() <= free


def _proved_without_weights(plan: Plan, target: Target, facts: Facts, replan: Callable[[Target], Plan]) -> Converted:
    """Prove a plan by its structure and on its twin.

    Raises:
        ConversionRefused: the proof failed, or the twin proves nothing.
    """
    # Built again: a copy of fake tensors would copy storage that is not there.
    edited = build_fake(target.config, next(target.model.parameters()).dtype, cls=type(target.model))
    for edit in plan.edits:
        edit.apply(edited)
    proof = prove(plan, target, edited, replan=replan, facts=facts)
    conversions.check_proof(plan, proof)
    if plan.exact and not proof.passed:
        why = f"it is too large to be proved in memory, and its twin was not: {proof.gate('twin').why}"
        raise ConversionRefused([f"{target.name}: {why}; --no-verify converts it without a proof"])
    return Converted(model=edited, proof=proof, plan=plan, target=target)
