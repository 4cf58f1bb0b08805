"""JSON for programs: schema 1, strict, in plain ASCII.

Keys may be added within a schema number; readers ignore what they do not know. Numbers JSON does
not have are the strings "nan", "inf" and "-inf". Names are exactly the model's; whatever could
harm a terminal is escaped. ``schema-1.json`` beside this file describes the format.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from normwise.facts.records import NormSite, Placement, Stack
from normwise.rendering.cleaning import respelled
from normwise.rendering.plain import plain
from normwise.spec import Gate, Modulation, NormSpec

if TYPE_CHECKING:
    from normwise.checkup.finding import Finding
    from normwise.checkup.report import Report

__all__ = ["SCHEMA", "render"]

SUFFIXES = (".json",)
FILE_OPTIONS: dict[str, Any] = {}
SCHEMA = 1


def render(report: Report) -> str:
    """Return the report in JSON, schema 1."""
    return respelled(json.dumps(plain(_document(report)), indent=2, allow_nan=False), "\\u{:04x}") + "\n"


def _document(report: Report) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "target": report.target,
        "inputs": report.inputs,
        "checkpoint_only": report.checkpoint_only,
        "weights": report.weights,
        "effort": report.effort,
        "call": report.call,
        "configuration": report.configuration,
        "notes": report.notes,
        "versions": report.versions,
        "cost": asdict(report.cost),
        "unchanged": report.unchanged,
        "rules_run": report.rules_run,
        "placement": _placement(report.placement),
        "norms": [_norm(site) for site in report.norms],
        "listed_apart": [_norm(site) for site in report.listed_apart],
        "not_executed": report.not_executed,
        "breaks": [asdict(each) for each in report.breaks],
        "profile": [asdict(row) for row in report.profile],
        "findings": [_finding(finding, report) for finding in report.findings],
        "passed": report.passed,
        "not_checked": [asdict(each) for each in report.not_checked],
        "suppressed": [
            {"by": each.by, "where": each.where, "reason": each.reason, "finding": _finding(each.finding, report)}
            for each in report.suppressed
        ],
        "unused": [asdict(each) for each in report.unused],
        "tolerances": report.tolerances,
    }


def _placement(placement: Placement) -> dict[str, Any]:
    return {
        "stacks": [_stack(stack) for stack in placement.stacks],
        "embedding_norm": placement.embedding_norm,
        "qk_norm": placement.qk_norm,
        "inner_norm": placement.inner_norm,
    }


def _stack(stack: Stack) -> dict[str, Any]:
    return {
        "kind": stack.kind,
        "name": stack.name,
        "depth": stack.depth,
        "sublayers": stack.sublayers,
        "starts_with_norm": stack.starts_with_norm,
        "final_norm": stack.final_norm,
        "width": stack.width,
        "mixture": {str(kind): count for kind, count in stack.mixture},
    }


def _norm(site: NormSite) -> dict[str, Any]:
    return {
        "path": site.path,
        **_spec(site),
        "placement": site.placement,
        "stack": site.stack,
        "layer": site.layer,
        "calls": site.calls,
        "native": site.native,
        "evidence": site.evidence,
        "source": site.source,
        "note": site.note,
        "weight_path": site.weight_path,
        "bias_path": site.bias_path,
        "shape": site.shape,
        "class": site.class_name,
    }


def _spec(site: NormSite) -> dict[str, Any]:
    """Return the flat fields of a spec; all null but the kind where the form is not understood."""
    form = site.spec or NormSpec()
    fields = {
        "kind": form.kind,
        "scope": form.scope,
        "axes": form.axes,
        "center": form.center,
        "statistic": form.statistic,
        "eps": form.eps,
        "eps_inside": form.eps_inside,
        "eps_clamp": form.eps_clamp,
        "biased": form.biased,
        "partial": form.partial,
        "stats_dtype": form.stats_dtype or site.dtype,  # a norm without a cast keeps the dtype of its input
        "upcast": form.stats_dtype is not None,
        "weight": form.weight,
        "weight_offset": int(form.weight_offset) if float(form.weight_offset).is_integer() else form.weight_offset,
        "weight_on_input": form.weight_on_input,
        "bias": form.bias,
        "cast": form.cast,
        "gated": form.gate is not Gate.NONE,
        "gate": form.gate,
        "modulated": form.modulation is not Modulation.NONE,
        "modulation": form.modulation,
        "groups": form.groups,
        "factor": form.factor,
        "out_dtype": form.out_dtype,
        "running": form.running,
        "momentum": form.momentum,
    }
    return fields if site.spec else {**dict.fromkeys(fields), "kind": "other"}


def _finding(finding: Finding, report: Report) -> dict[str, Any]:
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "basis": finding.basis,
        "path": finding.path,
        "paths": finding.paths or (finding.path,),
        "message": finding.message,
        "evidence": finding.evidence,
        "counterfactual": finding.counterfactual,
        "fix": finding.fix,
        "reproduce": report.reproduce(finding),
        "docs": finding.docs,
        "fingerprint": finding.fingerprint,
    }
