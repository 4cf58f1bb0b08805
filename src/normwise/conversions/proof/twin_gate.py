"""The twin gate: a randomised twin and its conversion agree in float64, on the inputs and where mistakes hide."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import nn

from normwise.conversions._apply import apply_to_model
from normwise.conversions.proof import probes as edges
from normwise.conversions.proof.compare import Outputs, lost_at
from normwise.conversions.proof.sight import unseen
from normwise.conversions.proof.subject import EXACT, NOT_EXACT, Gate, Subject, run_double, said
from normwise.conversions.proof.twin import Twin, calibrate, redraw, scaled_to, twin_of
from normwise.errors import NormwiseError
from normwise.rendering import both

__all__ = ["twin"]


def twin(subject: Subject) -> Gate:
    """Compare a randomised twin with its conversion in float64, on the inputs and on probes."""
    try:
        made = twin_of(subject.plan, subject.target, subject.norms, subject.replan)
    except NormwiseError as error:
        return Gate("twin", None, {}, str(error))

    def run(model: nn.Module) -> Outputs:
        return run_double(model, made.target.args, made.target.kwargs)

    for gentle in (False, True):
        redraw(made.target.model, made.norms, gentle=gentle, constants=made.plan.constants)
        try:
            calibrate(made.target.model, run)
            outputs = run(made.target.model)
        except Exception as error:  # the model's own code
            return Gate(
                "twin", None, {}, _told("the twin does not run in float64", "孪生模型无法以 float64 运行", error)
            )
        if outputs and all(bool(t.isfinite().any()) for t in outputs.values()):
            return _judged(subject, made)
    return Gate("twin", None, {}, both("the twin returns no finite numbers", "孪生模型的输出不是有限数"))


def _judged(subject: Subject, made: Twin) -> Gate:
    gaps: dict[str, float] = {}
    skipped: list[str] = []
    figures: dict[str, Any] = {"gap": 0.0, "bound": EXACT, "probes": gaps, "skipped": skipped, "twin": made.note}
    for original, probes in _cases(made):
        try:
            converted = copy.deepcopy(original)
            apply_to_model(made.plan, converted)
        except Exception as error:  # a wrong plan may fail anywhere
            return Gate("twin", False, figures, _told("the plan cannot be applied", "计划无法执行", error))
        for probe in probes:
            expected = _answer(original, probe)
            if expected is None:
                skipped.append(probe.name)
                continue
            try:
                found = subject.gaps(expected, run_double(converted, probe.args, probe.kwargs))
            except Exception as error:
                return Gate("twin", False, figures, _told("the converted twin fails", "转换后的孪生模型出错", error))
            gaps[probe.name] = max(found.values())
            figures["gap"] = max(gaps.values())
            if subject.plan.exact and figures["gap"] > EXACT:
                return Gate("twin", False, figures, _where(probe, original, converted, found))
    if not subject.plan.exact:
        return Gate("twin", None, figures, NOT_EXACT)
    return _seen(made, figures)


def _seen(made: Twin, figures: dict[str, Any]) -> Gate:
    """Return that the twin agrees, unless it is blind to most of what was changed."""
    converted = copy.deepcopy(made.target.model)
    apply_to_model(made.plan, converted)
    blind = unseen(made.plan, converted, made.target)
    if blind is not None:
        figures |= {"unseen": len(blind), "unseen tensors": blind}
        if 2 * len(blind) > len(made.plan.recipes):
            why = both(
                f"the outputs of the twin do not depend on {len(blind)} of {len(made.plan.recipes)} changed tensors",
                f"孪生模型的输出不依赖 {len(made.plan.recipes)} 个被改张量中的 {len(blind)} 个",
            )
            return Gate("twin", None, figures, why)
    return Gate("twin", True, figures, made.note)


def _cases(made: Twin) -> Iterator[tuple[nn.Module, list[edges.Probe]]]:
    """Yield the twin with its probes, and the twin scaled to each eps with the inputs."""
    probes = list(edges.of_target(made.target))
    yield made.target.model, probes
    for eps in edges.sizes_of_eps(made.norms):
        tiny = copy.deepcopy(made.target.model)
        scaled_to(tiny, made.norms, eps)
        yield tiny, [dataclasses.replace(probes[0], name=f"variance about eps {eps:g}")]


def _answer(original: nn.Module, probe: edges.Probe) -> Outputs | None:
    """Return what the twin answers; None where it does not take the inputs, or has no finite answer."""
    try:
        expected = run_double(original, probe.args, probe.kwargs)
    except Exception:  # the model's own code: it takes no such batch or length
        return None
    return expected if any(bool(t.isfinite().any()) for t in expected.values()) else None


def _told(en: str, zh: str, error: Exception) -> str:
    return both(f"{en}: {said(error)}", f"{zh}：{said(error)}")


def _where(probe: edges.Probe, original: nn.Module, converted: nn.Module, found: dict[str, float]) -> str:
    """Say which output is apart, and from which module on."""
    worst = max(found, key=lambda name: found[name])

    def run(model: nn.Module) -> None:
        run_double(model, probe.args, probe.kwargs)

    lost = lost_at(original, converted, run)
    size = f"{found[worst]:.1e}"
    en, zh = f"{worst} is apart by {size} ({probe.name})", f"{worst} 相差 {size}（{probe.name}）"
    if lost is None:
        return both(en, zh)
    before, after = lost
    if before is None:
        return both(f"{en}, from {after} on", f"{zh}，自 {after} 起")
    return both(f"{en}: {before} still agrees, {after} does not", f"{zh}：{before} 仍一致，{after} 不再一致")
