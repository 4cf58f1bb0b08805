"""The verbs: ``check`` (map and rules) and ``map`` (the map alone)."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from normwise import targets
from normwise.checkup import baseline, suppression
from normwise.checkup import configuration as configuration_file
from normwise.checkup import rule as rule_runner
from normwise.checkup.configuration import Configuration
from normwise.checkup.finding import Finding, NotChecked
from normwise.checkup.ranking import ranked
from normwise.checkup.report import Cost, Report
from normwise.errors import NotKnown
from normwise.facts import Facts
from normwise.facts.causality import CLAIM
from normwise.facts.freshness import untrained
from normwise.facts.records import NormSite, Placement, ProfileRow
from normwise.graph.guard import as_found, tensor_state
from normwise.rendering import both, in_language
from normwise.targets.target import Target
from normwise.theory.traced import beside

__all__ = ["check", "map"]

EFFORTS = ("read", "normal", "full")
_USUAL_EFFORT = "normal"
# hashing reads every weight twice; above this the comparison would cost more than the check (bytes)
_HASH_LIMIT = 4 * 2**30


def check(
    model: nn.Module | ExportedProgram | Target | str,
    inputs: Any = None,
    *,
    padded_inputs: Any = None,
    lengths: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    checkpoint: Mapping[str, torch.Tensor] | None = None,
    reference: nn.Module | None = None,
    config: Any = None,
    train_step: Callable[..., Any] | None = None,
    eval_fn: Callable[..., Any] | None = None,
    loader: Iterable[Any] | None = None,
    load_info: Any = None,
    online: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    claims: tuple[str, ...] = (),
    inputs_other_rank: Any = None,
    select: Iterable[str] | None = None,
    ignore: Iterable[str] | None = None,
    effort: str = "normal",
    configuration: Configuration | str | os.PathLike[str] | None = None,
    **more: Any,
) -> Report:
    """Map every norm of a model and judge it by the rules.

    The model is left exactly as it was found.

    Args:
        model: a module, a Target, or any TARGET string ("hf:bert", "model.py:build", ...).
        inputs: one call's inputs: a tuple of positional arguments, a dict of keyword arguments, or one tensor.
        padded_inputs: the same samples in the same rows with padding appended; further rows may follow.
        lengths: valid length of each row of ``padded_inputs``, in input steps.
        optimizer: what trains the model: are gains decayed, are they in it at all.
        scheduler: its learning-rate schedule.
        checkpoint: the state dict the model was loaded from.
        reference: a model known to be right.
        config: a dict or transformers configuration that the model was built from.
        train_step: ``train_step(model, *inputs)`` does forward and backward, and may step.
        eval_fn: ``eval_fn(model, batches)``, with an iterable of the model's first input.
        loader: yields tuples whose leading elements are the model's inputs.
        load_info: what ``load_state_dict`` or transformers' ``output_loading_info`` returned.
        online: the live model of which ``model`` is the averaged copy.
        dtype: the dtype it will run in; a copy is cast.
        claims: what the model promises, for example ``("causal",)``.
        inputs_other_rank: inputs that another rank may see.
        select: codes, code families or names of the rules to run ("PLC,NUM001" or a list); all by default.
        ignore: codes, code families or names of rules to leave out.
        effort: "read" (one traced pass), "normal" (at most 15 forward and backward passes, and two for each
            finding's counterfactual), or "full" (as many as the rules ask for).
        configuration: a TOML file with ``[tool.normwise]``, or what ``normwise.checkup.configuration.read`` returned.
            No file is looked for. ``select`` and ``ignore`` win over its own; what it keeps quiet, its baseline too,
            is in ``suppressed``. What it fails on is for callers that fail.
        more: further fields of ``Target`` (``name``).

    Returns:
        A report: ``print`` it, ``save`` it, or read ``findings``, ``norms`` and ``placement``.

    Raises:
        TargetError: the target cannot be loaded or fed.
        TraceError: the model's forward raised.
        ConfigurationError: the configuration or its baseline cannot be read or followed.
        ValueError: an unknown effort or rule.

    Examples:
        >>> import torch, normwise as nw
        >>> block = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> report = nw.check(block, torch.randn(2, 5, 16))
        >>> [(n.path, str(n.placement)) for n in report.norms]
        [('norm1', 'post'), ('norm2', 'post')]
    """
    evidence = _given(
        padded_inputs=padded_inputs,
        lengths=lengths,
        optimizer=optimizer,
        scheduler=scheduler,
        checkpoint=checkpoint,
        reference=reference,
        config=config,
        train_step=train_step,
        eval_fn=eval_fn,
        loader=loader,
        load_info=load_info,
        online=online,
        dtype=dtype,
        claims=claims if claims != () else None,
        inputs_other_rank=inputs_other_rank,
        **more,
    )
    if effort not in EFFORTS:
        raise ValueError(f"effort is one of {', '.join(EFFORTS)}, got {effort!r}")
    from normwise.checkup import rules

    asked = _configuration(configuration)
    known = None if asked.baseline is None else baseline.read(asked.baseline)
    wanted = rule_runner.chosen(rules.all_rules(), select or asked.select, ignore or asked.ignore)
    target = targets.target(model, inputs, **evidence)
    report = _report(target, wanted, effort, judged=True)
    suppressions = [*suppression.marked(target.model), *asked.suppressions()]
    suppressions += known.suppressions(report.target) if known is not None else []
    report = replace(report, call=_call(model, inputs, evidence, effort), configuration=asked.where)
    return suppression.quieted(report, suppressions)


def map(model: nn.Module | ExportedProgram | Target | str, inputs: Any = None, **evidence: Any) -> Report:
    """Map every norm of a model without judging it: a report with no rules run.

    Args:
        model: a module, an exported program, a Target, or any TARGET string.
        inputs: one call's inputs, as for ``check``.
        evidence: further fields of ``Target``.
    """
    return _report(targets.target(model, inputs, **evidence), {}, "read", judged=False)


def _configuration(given: Configuration | str | os.PathLike[str] | None) -> Configuration:
    if isinstance(given, Configuration):
        return given
    return Configuration() if given is None else configuration_file.read(given)


def _call(model: object, inputs: object, evidence: Mapping[str, Any], effort: str) -> str:
    """Return how the same check is called again; what is no text goes by the name of its argument."""
    said = [json.dumps(model) if isinstance(model, str) else "target" if isinstance(model, Target) else "model"]
    said += [json.dumps(inputs) if isinstance(inputs, str) else "inputs"] if inputs is not None else []
    said += [f"{name}={name}" for name in evidence]
    said += [f"effort={json.dumps(effort)}"] if effort != _USUAL_EFFORT else []
    return f"nw.check({', '.join(said)})"


def _given(**evidence: Any) -> dict[str, Any]:
    return {name: value for name, value in evidence.items() if value is not None}


@torch.inference_mode(False)  # the user may have called within it; gradients are measured
def _report(target: Target, rules: dict[str, Any], effort: str, *, judged: bool) -> Report:
    started = time.perf_counter()
    hashed = judged and _bytes_of(target.model) <= _HASH_LIMIT
    before = tensor_state(target.model) if hashed else None
    facts = Facts(target, effort)
    findings: list[Finding] = []
    passed: list[str] = []
    not_checked: list[NotChecked] = []
    with as_found(target.model, evaluate=None):  # facts undo what they do; this catches what a rule does besides
        norms, apart, placement, notes = _read(facts)
        profile, unprofiled = _profile(facts, effort)
        for name, rule in rules.items():
            verdict = rule_runner.run(name, rule, facts)
            if isinstance(verdict, NotChecked):
                not_checked.append(verdict)
            elif verdict:
                findings.extend(verdict)
            else:
                passed.append(rule.CODE)
    unchanged = tensor_state(target.model) == before if before is not None else None
    return Report(
        target=target.name,
        inputs=str(target.inputs_from),
        checkpoint_only=target.stored is not None,
        weights=str(target.weights),
        effort=effort,
        notes=(*target.notes, *_unread_claims(target), *notes, *unprofiled),
        versions=_versions(),
        cost=Cost(
            seconds=time.perf_counter() - started,
            forward_passes=facts.forward_passes,
            backward_passes=facts.backward_passes,
            repair_passes=facts.repair_passes,
            peak_bytes=_peak_bytes(),
        ),
        placement=placement,
        norms=norms,
        listed_apart=apart,
        not_executed=_if_known(facts, "not_executed"),
        breaks=_if_known(facts, "breaks"),
        profile=profile,
        findings=ranked(findings, rules),
        passed=tuple(sorted(passed)),
        not_checked=tuple(sorted(not_checked, key=lambda n: n.code)),
        rules_run=judged,
        tolerances={rule.CODE: numbers for rule in rules.values() if (numbers := rule_runner.tolerances(rule))},
        unchanged=unchanged,
    )


def _read(facts: Facts) -> tuple[tuple[NormSite, ...], tuple[NormSite, ...], Placement, tuple[str, ...]]:
    if facts.target.stored is not None:
        return facts.norms, (), Placement(), ()
    try:
        return facts.norms, facts.listed_apart, facts.placement, facts.recording.notes
    except NotKnown as unknown:
        return (), (), Placement(), (_note("the model was not run", "模型没有运行", unknown),)


def _if_known(facts: Facts, name: str) -> tuple[Any, ...]:
    try:
        return getattr(facts, name)
    except NotKnown:
        return ()


def _profile(facts: Facts, effort: str) -> tuple[tuple[ProfileRow, ...], tuple[str, ...]]:
    if effort == "read" or facts.target.stored is not None:
        return (), ()
    try:
        rows = facts.profile
    except NotKnown as unknown:
        return (), (_note("profile by depth not measured", "没有测得随深度的变化", unknown),)
    return _with_theory(facts, rows)


def _with_theory(facts: Facts, rows: tuple[ProfileRow, ...]) -> tuple[tuple[ProfileRow, ...], tuple[str, ...]]:
    """Put what is expected beside what was measured, where the model stands at its initialisation."""
    try:
        if not untrained(facts):
            return rows, ()
        return beside(facts, rows), ()
    except NotKnown as unknown:
        why = unknown
    except Exception as error:  # pieces of the user's program are run again: no failure of them may end a check
        why = NotKnown(both(f"{type(error).__name__}: {error}", f"{type(error).__name__}：{error}"))
    return rows, (_note("theory not drawn", "没有画出理论曲线", why),) if _of_transformer(facts) else ()


def _of_transformer(facts: Facts) -> bool:
    """Whether a stack attends: nobody expects a theory of anything else."""
    return any("attention" in member.branch for stack in facts.placement.stacks for member in stack.members)


def _unread_claims(target: Target) -> tuple[str, ...]:
    """Say which claims no rule knows: a misspelt one would be passed over in silence."""
    unread = [repr(claim) for claim in target.claims if claim != CLAIM]
    if not unread:
        return ()
    said = ", ".join(unread)
    return (
        both(f"no rule reads the claim {said}; known is {CLAIM!r}", f"没有规则读取声明 {said}；已知的是 {CLAIM!r}"),
    )


def _note(en: str, zh: str, unknown: NotKnown) -> str:
    return both(f"{en}: {unknown.why}", f"{zh}：{in_language(unknown.why, 'zh')}")


def _bytes_of(model: nn.Module) -> int:
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if not nn.parameter.is_lazy(t))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for package in ("normwise", "torch", "transformers"):
        if package == "transformers" and package not in sys.modules:
            continue
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _peak_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows has no getrusage
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
