"""Every norm of the corpus is described as it is, or reported as not understood; nothing else is called a norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normwise as nw
from normwise.facts.records import NormSite
from normwise.rendering import in_language
from normwise.spec import Cast, Kind, NormSpec, Scope, Statistic, Weight, reference

from .corpus_norms import CONTROLS, NORMS, NormCase, OneOf, closed_form, host, inputs


def _randomize(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data.uniform_(0.25, 1.0, generator=generator)


class _Spy(nn.Module):
    """Calls a norm and keeps what went in and what came out (a ScriptModule takes no hooks)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.seen: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def forward(self, *args: Tensor) -> Tensor:
        y = self.norm(*args)
        self.seen.append((args, y))
        return y


def _in_and_out(case: NormCase) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    model = host(case)
    _randomize(model)
    spy = _Spy(model.norm)
    model.norm = spy
    with torch.no_grad():
        model(*inputs(case))
    ((args, y),) = spy.seen
    return spy.norm, args, y


@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.name)
def test_every_norm_of_the_corpus_computes_what_it_is_expected_to(case: NormCase) -> None:
    norm, args, y = _in_and_out(case)
    if case.formula is not None:
        wanted = case.formula(norm, *args)
    else:
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        wanted = closed_form(args[0], case.expected, weight, bias)
    torch.testing.assert_close(y.double(), wanted, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("case", [case for case in NORMS if case.formula is None], ids=lambda case: case.name)
def test_the_definition_of_the_expected_spec_agrees_with_the_implementation(case: NormCase) -> None:
    norm, (x,), y = _in_and_out(case)
    spec = _spec(case)
    weight = getattr(norm, "weight", None) if spec.weight is not Weight.NONE else None
    bias = getattr(norm, "bias", None) if spec.bias else None
    with torch.no_grad():
        wanted = reference(spec, x, weight, bias)
    torch.testing.assert_close(y, wanted, rtol=case.tolerance, atol=case.tolerance)


@pytest.mark.parametrize("case", NORMS, ids=lambda case: case.name)
def test_a_norm_is_described_as_it_is_or_reported_as_not_understood(case: NormCase) -> None:
    report = nw.map(host(case), inputs(case))
    sites = [site for site in report.norms if site.path == "norm" or site.path.startswith(("norm#", "norm."))]
    understood = [site for site in sites if site.spec is not None and str(site.evidence) != "unknown"]
    assert [site.path for site in report.norms if site not in sites] == []
    for site in sites:
        if site not in understood:
            assert site.note, f"{site.path} is unknown, but no reason is given"
        assert site.note is None or in_language(site.note, "zh") != site.note
    if not case.unknown:
        assert len(understood) == case.count, f"sites: {sites}"
    assert len(understood) <= case.count
    assert report.placement.stacks == (), "a projection, a norm and a projection hold no residual add"
    for site in understood:
        assert _differences(site.spec, _visible(case, site)) == {}
        if case.verified and not site.native:
            assert str(site.evidence) == "verified"


RESIDUAL = ("global_response",)


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: case.name)
def test_what_is_no_norm_is_not_called_one(case: NormCase) -> None:
    report = nw.map(host(case), inputs(case))
    assert [(site.path, site.spec) for site in report.norms if site.spec is not None] == []
    assert report.placement.stacks == () or case.name in RESIDUAL


BFLOAT16 = {"rms_llama": "float32", "rms_gemma": "float32", "rms_t5": "float32", "rms_without_upcast": None}


@pytest.mark.parametrize("name", BFLOAT16)
def test_the_dtype_of_the_statistics_is_seen_in_half_precision(name: str) -> None:
    case = next(case for case in NORMS if case.name == name)
    model = host(case).bfloat16()
    (site,) = nw.map(model, tuple(x.bfloat16() for x in inputs(case))).norms
    assert site.spec is not None
    assert site.spec.stats_dtype in ((None, "bfloat16") if BFLOAT16[name] is None else ("float32",))


def test_a_broken_dataflow_is_reported() -> None:
    case = next(case for case in NORMS if case.name == "rms_numpy_detour")
    report = nw.map(host(case), inputs(case))
    assert report.breaks or any(site.path == "norm" and site.note for site in report.norms)
    assert [lost for lost in report.breaks if in_language(lost.what, "zh") == lost.what] == []


@pytest.mark.parametrize("name", ["router_l1", "router_top_k", "sinkhorn", "weight_standardized"])
def test_renormalized_probabilities_and_weights_are_listed_apart(name: str) -> None:
    case = next(case for case in CONTROLS if case.name == name)
    assert nw.map(host(case), inputs(case)).listed_apart


def test_a_norm_inside_is_found_whatever_its_host_is_called() -> None:
    case = replace(next(case for case in NORMS if case.name == "rms_llama"), name="renamed")
    model = host(case)
    model.add_module("q7", model.norm)
    assert {site.path for site in nw.map(model, inputs(case)).norms} <= {"norm", "q7"}


# Behaviour shows what a norm is, not how it is parametrised
SEEN_FROM_OUTSIDE = ("kind", "center", "axes")


def _visible(case: NormCase, site: NormSite) -> dict[str, Any]:
    probed = str(site.evidence) == "probed"
    return {name: value for name, value in case.expected.items() if not probed or name in SEEN_FROM_OUTSIDE}


def _spec(case: NormCase) -> NormSpec:
    fields = {name: value[0] if isinstance(value, OneOf) else value for name, value in case.expected.items()}
    kind = Kind(fields.pop("kind"))
    scope = {Kind.BATCH: Scope.BATCH, Kind.GROUP: Scope.GROUP, Kind.INSTANCE: Scope.INSTANCE}.get(kind, Scope.HIDDEN)
    statistic = {Kind.RMS: Statistic.MEAN_SQUARE, Kind.SCALE: Statistic.L2}.get(kind, Statistic.VARIANCE)
    words = {"weight": Weight, "cast": Cast}
    fields = {name: words[name](value) if name in words else value for name, value in fields.items()}
    defaults = {"center": kind not in (Kind.RMS, Kind.SCALE), "weight": Weight.NONE}
    spec = NormSpec(**{**defaults, **fields, "scope": scope, "statistic": statistic})
    assert spec.kind is kind
    return spec


def _differences(spec: Any, expected: Any) -> dict[str, tuple[Any, Any]]:
    wrong = {}
    for name, wanted in expected.items():
        if name == "biased" and expected.get("kind") in ("rms", "scale"):
            continue
        got = getattr(spec, name)
        allowed = wanted if isinstance(wanted, OneOf) else (wanted,)
        if not any(_same(got, value) for value in allowed):
            wrong[name] = (got, wanted)
    if expected.get("eps_clamp"):
        wrong.pop("eps_inside", None)
    return wrong


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(got, int | float):
        return got == pytest.approx(wanted, rel=1e-4, abs=1e-15)
    if isinstance(wanted, str):
        return str(got) == wanted
    return bool(got == wanted)
