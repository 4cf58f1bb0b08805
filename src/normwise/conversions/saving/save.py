"""Saves a converted model: everything is written and verified beside the output, then put in its place at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from normwise.conversions._apply import has_storage
from normwise.conversions._plan import Plan
from normwise.conversions.proof import Gate, Proof, reload_gate
from normwise.conversions.proof.compare import gap
from normwise.conversions.proof.subject import EXACT, run_copy
from normwise.conversions.saving import formats
from normwise.conversions.saving.checkpoint import PICKLES, Checkpoint
from normwise.conversions.saving.loading import MANIFEST
from normwise.conversions.saving.output import Output, is_transformers
from normwise.conversions.saving.publishing import check_output, copy_file, published
from normwise.conversions.saving.report import read_report, record, write_manifest, write_report
from normwise.conversions.saving.streaming import stream
from normwise.conversions.saving.weights import SHARD_SIZE, in_memory
from normwise.errors import ConversionRefused
from normwise.rendering import both
from normwise.targets import folder

if TYPE_CHECKING:
    from normwise.conversions._converted import Converted

__all__ = ["convert_checkpoint", "save_converted"]

Advance = Callable[[str, int, int], Any]
_NOT_LOADED = both("what was written was not loaded again", "写出的内容没有重新加载")
_ROOM = 10_000_000  # bytes of whatever is not weights
_WRITTEN_BY_US = ("report.md", "normwise_report.json", "normwise.json", "config.json", "modeling_normwise.py")


def convert_checkpoint(
    plan: Plan,
    source: str | Path,
    out: str | Path,
    *,
    model: nn.Module,
    format: str | None = None,
    force: bool = False,
    converted: Converted | None = None,
    verify: bool = True,
    advance: Advance = lambda text, done, total: None,
) -> dict[str, Any]:
    """Convert a checkpoint on disk, tensor by tensor; the source is only read.

    The memory it takes is that of a few of the largest tensor in float64, whatever the size of the checkpoint.

    Args:
        plan: of ``model``.
        source: a .safetensors file, an index of shards, or a transformers folder.
        out: a folder, or a file that ends in .safetensors for weights of one file.
        model: what was planned; it needs no storage (``targets.hf_build.build_fake``).
        format: of ``normwise.conversions.saving.formats``; the simplest that can hold the result by default.
        force: replace what is there.
        converted: the same conversion in memory, with its proof; what was written is loaded again and must equal it.
            Without it nothing is verified, and the report says so.
        verify: load it again and compare; False where ``converted`` holds no numbers.
        advance: is told what is done, how many bytes of it, and of how many.

    Returns:
        The report, as it lies beside the weights.

    Raises:
        ConversionRefused: the checkpoint is not of this model, was converted before, no format holds the result, or
            it was not the same when it was loaded again.
        ValueError: the output would harm the source, or is not empty; see ``publishing.check_output``.
        OSError: the disk is full.
    """
    checkpoint = Checkpoint.open(source)
    before = None if checkpoint.folder is None else read_report(checkpoint.folder)
    if before is not None and (before["conversion"] == plan.conversion or before["format"] != "stock"):
        raise ConversionRefused([f"{source} was written by {before['conversion']} already; convert the original"])
    output = Output(
        plan=plan, model=model, weights=stream(plan, checkpoint, model), checkpoint=checkpoint, others=checkpoint.folder
    )
    return _save(output, Path(out), format, force=force, converted=converted, verify=verify, advance=advance)


def save_converted(
    converted: Converted,
    out: str | Path,
    *,
    format: str | None = None,
    force: bool = False,
    verify: bool = True,
    shard_size: int = SHARD_SIZE,
    advance: Advance = lambda text, done, total: None,
) -> dict[str, Any]:
    """Save a model that was converted in memory; see ``Converted.save``.

    Args:
        converted: with the proof; where its target is a folder, the tokenizer is copied from there.
        out: see ``convert_checkpoint``.
        format: see there.
        force: see there.
        verify: load it again and compare.
        shard_size: bytes of a file, at most.
        advance: see there.

    Raises:
        ConversionRefused: see there; or the model holds no numbers.
        TypeError: ``shard_size`` is no whole number.
    """
    model, name = converted.model, converted.target.name
    if not has_storage(model):
        raise ConversionRefused([f"{name} holds no numbers to save: load its weights first, or convert its checkpoint"])
    if not isinstance(shard_size, int):
        raise TypeError(f"shard_size={shard_size!r}: give a number of bytes")
    others = Path(name.removeprefix("hf:")).expanduser() if folder.claims(name) else None
    tied = not is_transformers(model) or getattr(model.config, "tie_word_embeddings", False)
    weights = in_memory(model.state_dict(), shard_size, share=bool(tied))
    output = Output(plan=converted.plan, model=model, weights=weights, others=others)
    return _save(output, Path(out), format, force=force, converted=converted, verify=verify, advance=advance)


def _save(
    output: Output,
    out: Path,
    asked: str | None,
    *,
    force: bool,
    converted: Converted | None,
    verify: bool,
    advance: Advance,
) -> dict[str, Any]:
    alone = out.suffix == ".safetensors"
    name = asked or ("safetensors" if alone else formats.choose(output))
    form = formats.get(name)
    if (why := form.refusal(output)) is not None:
        raise ConversionRefused([f"the format {name}: {why}"])
    if alone and (name != "safetensors" or output.weights.index_name is not None):
        raise ValueError(f"{out} names one file, and what is written is a folder: give the name of a folder")
    weights = output.weights.renamed((lambda _: out.name) if alone else form.file_name)
    sources = output.sources()
    check_output(out, sources, force=force)
    hashes = _hashes(output)
    with published(out, size=weights.size() + _ROOM, sources=sources, force=force) as temporary:
        done = 0

        def step(size: int) -> None:
            nonlocal done
            done += size
            advance(f"writing {out.name}", done, weights.size())

        written = weights.write(temporary, step)
        form.finish(temporary, output)
        left_out = () if name == "safetensors" else _copy_others(output, temporary)
        proof = None if converted is None else converted.proof
        if converted is not None and verify:
            advance("loading it again", done, weights.size())
            proof = _verified(converted, form, output, temporary)
        elif proof is not None:
            proof = proof.with_gate(Gate("reload", None, {}, _NOT_LOADED))
        if _hashes(output) != hashes:
            raise ConversionRefused(["the source was changed while it was converted, nothing was kept"])
        notes = (form.NOTE,) if hasattr(form, "NOTE") else ()
        report = record(
            output, format=name, proof=proof, source=hashes, files=written, left_out=left_out, notes=notes
        )  # fmt: skip
        if not alone:
            write_report(temporary, report, proof)
        if name == "manifest":
            write_manifest(temporary / MANIFEST, report, output)
    return report


def _verified(converted: Converted, form: ModuleType, output: Output, temporary: Path) -> Proof:
    """Return the proof with its reload gate.

    Raises:
        ConversionRefused: what was written is not what was converted.
    """
    target, expected = converted.target, converted.model
    if hasattr(form, "expected"):  # norms of its own, whose last bits differ from ours
        expected = form.expected(expected, output)
        if (apart := gap(run_copy(converted.model, target), run_copy(expected, target))) > EXACT:
            raise ConversionRefused([f"the norms of this format compute something else, {apart:.2g} in float64"])
    gate = reload_gate(lambda: form.load(temporary, output, target.model), expected, target)
    if gate.passed is False:
        raise ConversionRefused([f"what was written is not what was converted, nothing was kept: {gate.why}"])
    return converted.proof.with_gate(gate)


def _hashes(output: Output) -> Mapping[str, str]:
    return {} if output.checkpoint is None else output.checkpoint.hashes()


def _copy_others(output: Output, temporary: Path) -> tuple[str, ...]:
    """Copy the tokenizer and whatever else lies beside the weights, verbatim; return what was not copied."""
    if output.others is None:
        return ()
    weights = {file.name for file in output.sources()}
    left_out = []
    for file in sorted(output.others.iterdir()):
        if file.name in weights or file.name in _WRITTEN_BY_US or (temporary / file.name).exists():
            continue
        if not file.is_file() or file.name.endswith((*PICKLES, ".safetensors")):
            left_out.append(file.name + "/" * file.is_dir())
        else:
            copy_file(file, temporary / file.name)
    return tuple(left_out)
