"""A model made of normwise's own layers is mapped like anybody's: by its dataflow, with what each norm computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normwise as nw
from normwise import kernels, layers
from normwise.facts.records import NormSite
from normwise.functional.batch import BATCH, batch_spec, instance_spec
from normwise.functional.group import group_spec
from normwise.graph import trace
from normwise.spec import Cast, Form, Gate, NormSpec, Statistic, Weight
from normwise.spec.definition import eps_of, plain
from normwise.targets import target

HIDDEN, CHANNELS = 24, 12
DTYPES = (torch.float32, torch.bfloat16)
FIELDS = ("kind", "axes", "eps", "eps_inside", "eps_clamp", "biased", "groups", "factor", "weight", "weight_offset")
MORE = ("bias", "center", "modulation", "gate", "partial", "weight_on_input", "running")


class Host(nn.Module):
    """Projects to what a norm takes, normalizes, projects."""

    def __init__(self, norm: nn.Module, layout: str) -> None:
        super().__init__()
        self.layout, self.norm = layout, norm
        image = layout == "image"
        self.into = nn.Conv2d(3, CHANNELS, 3, padding=1) if image else nn.Linear(10, HIDDEN)
        self.more = nn.Linear(10, HIDDEN if layout == "gated" else 2 * HIDDEN)
        self.out = nn.Conv2d(CHANNELS, 5, 1) if image else nn.Linear(HIDDEN, 5)

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        h = self.into(x)
        if self.layout == "sequence":
            return self.out(self.norm(h.mT, **options).mT)
        if self.layout == "gated":
            return self.out(self.norm(h, self.more(x)))
        if self.layout == "modulated":
            scale, shift = self.more(x).mean(1, keepdim=True).chunk(2, -1)
            return self.out(self.norm(h, scale, shift))
        if self.layout == "conditioned":
            return self.out(self.norm(h, x.mean(1)))
        return self.out(self.norm(h, **options))


class TorchValues(nn.Module):
    """A spec whose value is that of torch's own op, and whose gradient is ours."""

    def __init__(self, spec: NormSpec) -> None:
        super().__init__()
        self.spec = replace(spec, form=Form.TORCH)
        self.weight, self.bias = nn.Parameter(torch.ones(CHANNELS)), nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        return kernels.forward(self.spec, x, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer, where it stands, and the spec it has there."""

    name: str
    build: Callable[[], nn.Module]
    layout: str = "tokens"
    spec: Callable[[Any], NormSpec] = lambda norm: norm.spec
    options: Mapping[str, Tensor] = field(default_factory=dict)
    finding: str | None = None  # what such a layer is told of, rightly


def _families() -> list[Case]:
    """One case for each different spec, under the first of its names."""
    cases: dict[NormSpec, Case] = {}
    for name, spec in layers.FAMILIES.items():
        if spec.gate is Gate.NONE:
            build = lambda spec=spec: layers.Norm(spec, HIDDEN)  # noqa: E731
            cases.setdefault(spec, Case(name=f"like {name}", build=build))
        else:
            gated = lambda name=name: layers.GatedRMSNorm.like(name, HIDDEN)  # noqa: E731
            cases.setdefault(spec, Case(name=f"like {name}", build=gated, layout="gated"))
    return list(cases.values())


def _bare(spec: NormSpec) -> NormSpec:
    return replace(spec, weight=Weight.NONE, bias=False)


def _batch(ndim: int, channel_dim: int = 1) -> Callable[[Any], NormSpec]:
    return lambda norm: batch_spec(norm.spec, ndim, channel_dim)


L2 = NormSpec(statistic=Statistic.L2, eps=1e-12, eps_inside=False, eps_clamp=True, weight=Weight.NONE)
LLAMA = layers.FAMILIES["llama"]
LENGTHS = {"lengths": torch.tensor([7, 4])}
MASK = {"mask": torch.arange(7) < torch.tensor([[7], [4]])}
MIXES = "sample-mixing-in-eval"  # statistics of the batch in eval mode: the samples of a batch share them
CASES = [
    Case(name="layer", build=lambda: layers.LayerNorm(HIDDEN)),
    Case(name="layer without bias", build=lambda: layers.LayerNorm(HIDDEN, bias=False)),
    Case(name="layer without affine", build=lambda: layers.LayerNorm(HIDDEN, elementwise_affine=False)),
    Case(name="rms", build=lambda: layers.RMSNorm(HIDDEN)),
    Case(name="rms with unit offset", build=lambda: layers.RMSNorm(HIDDEN, add_unit_offset=True)),
    Case(name="rms without eps", build=lambda: layers.RMSNorm(HIDDEN, 0.0)),
    *_families(),
    Case(name="scale", build=lambda: layers.ScaleNorm(HIDDEN)),
    Case(name="l2", build=lambda: layers.L2Norm(), spec=lambda _: L2),
    Case(name="partial rms", build=lambda: layers.PartialRMSNorm(HIDDEN, 0.25)),
    Case(name="centered rms", build=lambda: layers.CenteredRMSNorm(HIDDEN)),
    Case(name="gated", build=lambda: layers.GatedRMSNorm(HIDDEN), layout="gated"),
    Case(name="gated first", build=lambda: layers.GatedRMSNorm(HIDDEN, norm_before_gate=False), layout="gated"),
    Case(name="gated in groups", build=lambda: layers.GatedRMSNorm(HIDDEN, groups=4), layout="gated"),
    Case(name="modulated layer", build=lambda: layers.ModulatedLayerNorm(HIDDEN), layout="modulated"),
    Case(name="modulated rms", build=lambda: layers.ModulatedRMSNorm(HIDDEN), layout="modulated"),
    Case(name="ada layer", build=lambda: layers.AdaLayerNorm(HIDDEN, 10), layout="conditioned"),
    Case(name="ada rms", build=lambda: layers.AdaRMSNorm(HIDDEN, 10), layout="conditioned"),
    Case(
        name="channel layer",
        build=lambda: layers.ChannelLayerNorm(CHANNELS),
        layout="image",
        spec=lambda n: replace(n.spec, axes=(-3,)),
    ),
    Case(
        name="channel rms",
        build=lambda: layers.ChannelRMSNorm(CHANNELS),
        layout="image",
        spec=lambda n: replace(n.spec, axes=(-3,)),
    ),
    Case(name="batch 2d", build=lambda: layers.BatchNorm2d(CHANNELS), layout="image", spec=_batch(4)),
    Case(name="batch 1d", build=lambda: layers.BatchNorm1d(HIDDEN), layout="sequence", spec=_batch(3)),
    Case(name="batch channels last", build=lambda: layers.BatchNorm(HIDDEN, channel_dim=-1), spec=_batch(3, -1)),
    Case(
        name="batch without affine",
        build=lambda: layers.BatchNorm2d(CHANNELS, affine=False),
        layout="image",
        spec=lambda n: _bare(_batch(4)(n)),
    ),
    Case(
        name="batch of this batch",
        build=lambda: layers.BatchNorm2d(CHANNELS, track_running_stats=False),
        layout="image",
        spec=_batch(4),
        finding=MIXES,
    ),
    Case(
        name="batch of this batch, channels last",
        build=lambda: layers.BatchNorm(HIDDEN, track_running_stats=False, channel_dim=-1),
        spec=_batch(3, -1),
        finding=MIXES,
    ),
    Case(
        name="batch with a mask",
        build=lambda: layers.BatchNorm(HIDDEN, channel_dim=-1),
        spec=_batch(3, -1),
        options=MASK,
    ),
    Case(
        name="batch of this batch with a mask",
        build=lambda: layers.BatchNorm(HIDDEN, track_running_stats=False, channel_dim=-1),
        spec=_batch(3, -1),
        options=MASK,
        finding=MIXES,
    ),
    Case(
        name="batch of this batch with lengths",
        build=lambda: layers.BatchNorm1d(HIDDEN, track_running_stats=False),
        layout="sequence",
        spec=_batch(3),
        options=LENGTHS,
        finding=MIXES,
    ),
    Case(name="frozen batch", build=lambda: layers.FrozenBatchNorm(CHANNELS), layout="image", spec=_batch(4)),
    Case(
        name="group", build=lambda: layers.GroupNorm(4, CHANNELS), layout="image", spec=lambda n: group_spec(4, 1e-5, 4)
    ),
    Case(
        name="group 1d",
        build=lambda: layers.GroupNorm(4, HIDDEN),
        layout="sequence",
        spec=lambda n: group_spec(4, 1e-5, 3),
    ),
    Case(
        name="group with lengths",
        build=lambda: layers.GroupNorm(4, HIDDEN),
        layout="sequence",
        spec=lambda n: group_spec(4, 1e-5, 3),
        options=LENGTHS,
    ),
    Case(
        name="instance 2d",
        build=lambda: layers.InstanceNorm2d(CHANNELS),
        layout="image",
        spec=lambda n: _bare(instance_spec(1e-5, 4)),
    ),
    Case(
        name="instance 2d affine",
        build=lambda: layers.InstanceNorm2d(CHANNELS, affine=True),
        layout="image",
        spec=lambda n: instance_spec(1e-5, 4),
    ),
    Case(
        name="instance 1d",
        build=lambda: layers.InstanceNorm1d(HIDDEN, affine=True),
        layout="sequence",
        spec=lambda n: instance_spec(1e-5, 3),
    ),
    Case(
        name="instance with lengths",
        build=lambda: layers.InstanceNorm1d(HIDDEN, affine=True),
        layout="sequence",
        spec=lambda n: instance_spec(1e-5, 3),
        options=LENGTHS,
    ),
    Case(name="layer over two axes", build=lambda: layers.LayerNorm((7, HIDDEN))),
    Case(name="rms over two axes", build=lambda: layers.RMSNorm((7, HIDDEN))),
    Case(name="eps beside the root", build=lambda: layers.Norm(replace(LLAMA, eps_inside=False), HIDDEN)),
    Case(name="eps as a bound", build=lambda: layers.Norm(replace(LLAMA, eps_inside=False, eps_clamp=True), HIDDEN)),
    Case(name="a constant factor", build=lambda: layers.Norm(replace(LLAMA, factor=2.0), HIDDEN)),
    Case(name="unbiased", build=lambda: layers.Norm(replace(layers.FAMILIES["deberta"], biased=False), HIDDEN)),
    Case(name="layer without eps", build=lambda: layers.Norm(replace(layers.FAMILIES["cohere"], eps=0.0), HIDDEN)),
    Case(name="rms with a mask", build=lambda: layers.Norm(LLAMA, HIDDEN), options={"mask": MASK["mask"][..., None]}),
    Case(
        name="channel layer 1d",
        build=lambda: layers.ChannelLayerNorm(HIDDEN),
        layout="sequence",
        spec=lambda n: replace(n.spec, axes=(-2,)),
    ),
    Case(name="sync batch", build=lambda: layers.SyncBatchNorm(CHANNELS), layout="image", spec=_batch(4)),
    Case(
        name="batch without bias",
        build=lambda: layers.BatchNorm2d(CHANNELS, bias=False),
        layout="image",
        spec=_batch(4),
    ),
    Case(
        name="instance with running statistics",
        build=lambda: layers.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True),
        layout="image",
        spec=lambda n: batch_spec(replace(BATCH, running=True), 4, 1),
        finding="train-eval-gap",  # its own statistics in train mode, one fixed map in eval mode
    ),
    Case(name="torch's group", build=lambda: TorchValues(group_spec(4, 1e-5, 4)), layout="image"),
    Case(name="torch's instance", build=lambda: TorchValues(instance_spec(1e-5, 4)), layout="image"),
    Case(
        name="torch's batch",
        build=lambda: TorchValues(batch_spec(replace(BATCH, running=False), 4, 1)),
        layout="image",
        finding=MIXES,
    ),
]


def _model(case: Case, dtype: torch.dtype) -> tuple[Host, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    host = Host(case.build(), case.layout)
    for parameter in host.parameters():
        nn.init.uniform_(parameter, 0.2, 0.8)
    for buffer in host.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    x = torch.randn((2, 3, 9, 8) if case.layout == "image" else (2, 7, 10))
    return host.to(dtype).eval(), x.to(dtype), dict(case.options)


def _wanted(spec: NormSpec, dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values of every field."""
    wide = torch.promote_types(dtype, getattr(torch, spec.stats_dtype)) if spec.stats_dtype else dtype
    wanted: dict[str, tuple[Any, ...]] = {name: (getattr(spec, name),) for name in (*FIELDS, *MORE)}
    wanted["eps"] = (eps_of(spec, wide),)
    if spec.eps == 0:  # nothing is added anywhere
        del wanted["eps_inside"]
    if spec.eps_clamp:
        del wanted["eps_inside"]
    if wide != torch.float32 or dtype != torch.float32:
        wanted["stats_dtype"] = (None, "bfloat16") if spec.stats_dtype is None else ("float32",)
    wanted["cast"] = _casts(spec, dtype)
    return wanted


def _casts(spec: NormSpec, dtype: torch.dtype) -> tuple[Cast, ...]:
    """Return how the roundings of a spec may be named: without a gain, all places are one."""
    after = (Cast.AFTER_WEIGHT, Cast.NONE)
    kept_inside = spec.form is Form.TORCH and dtype is torch.float32  # torch's op rounds by itself
    if spec.weight is Weight.NONE or spec.weight_on_input or spec.stats_dtype is None or kept_inside:
        return tuple(Cast)
    if spec.cast is Cast.TO_WEIGHT:
        return after if dtype is torch.float32 else (Cast.BEFORE_WEIGHT,)
    return (Cast.BEFORE_WEIGHT,) if spec.cast is Cast.BEFORE_WEIGHT else after


def _differences(site: NormSite, wanted: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (getattr(site.spec, name), allowed)
        for name, allowed in wanted.items()
        if not any(_same(getattr(site.spec, name), value) for value in allowed)
    }


def _same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(got, float):
        return got == pytest.approx(wanted, rel=1e-4, abs=1e-15)
    return bool(got == wanted)


# every case by default, in one of the dtypes; in all with the slow ones
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(c, d, id=f"{c.name}-{d}", marks=pytest.mark.slow if (i + j) % len(DTYPES) else ())
        for i, c in enumerate(CASES)
        for j, d in enumerate(DTYPES)
    ],
)
def test_a_layer_is_one_site_that_says_what_it_is_and_raises_no_false_finding(case: Case, dtype: torch.dtype) -> None:
    model, x, options = _model(case, dtype)
    report = nw.check(model, {"x": x, **options})
    (site,) = report.norms
    assert report.listed_apart == ()
    assert (site.path, site.spec is not None) == ("norm", True)
    assert _differences(site, _wanted(case.spec(model.norm), dtype)) == {}
    assert str(site.evidence) == "verified"
    assert [f.name for f in report.findings if str(f.severity) != "info"] == ([case.finding] if case.finding else [])


class Attention(nn.Module):
    """Causal attention with two heads, with or without norms on queries and keys."""

    def __init__(self, qk: nn.Module | None = None) -> None:
        super().__init__()
        self.qkv, self.o, self.qk = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), qk

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)) for part in self.qkv(x).chunk(3, -1))
        if self.qk is not None:
            q, k = self.qk(q, k)
        return self.o(_attend(q, k, v).flatten(-2))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 48), nn.SiLU(), nn.Linear(48, HIDDEN))


class Decoder(nn.Module):
    """A pre-norm decoder, each norm by itself."""

    def __init__(self, norm: Callable[[], nn.Module], qk: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, HIDDEN), nn.Linear(HIDDEN, 11)
        self.norms = nn.ModuleList(norm() for _ in range(8))
        self.mixers = nn.ModuleList(_mlp() if i % 2 else Attention(qk and qk()) for i in range(8))
        self.last = norm()

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            h = h + mixer(norm(h))
        return self.head(self.last(h))


class AddingDecoder(Decoder):
    """The same decoder, each residual add in the norm behind it."""

    def forward(self, tokens: Tensor) -> Tensor:
        y, stream = self.embed(tokens), None
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            y, stream = norm(y, stream)
            y = mixer(y)
        return self.head(self.last(y, stream)[0])


def _decoder(kind: type[Decoder], dtype: torch.dtype, *norms: Callable[[], nn.Module]) -> Decoder:
    torch.manual_seed(0)
    return kind(*norms).to(dtype).eval()


TOKENS = torch.arange(10).reshape(2, 5)
DECODERS: dict[str, tuple[type[Decoder], Callable[[], nn.Module]]] = {
    "RMSNorm": (Decoder, lambda: layers.RMSNorm(HIDDEN)),
    "like llama": (Decoder, lambda: layers.RMSNorm.like("llama", HIDDEN)),
    "like gemma": (Decoder, lambda: layers.RMSNorm.like("gemma", HIDDEN)),
    "LayerNorm": (Decoder, lambda: layers.LayerNorm(HIDDEN)),
    "like cohere": (Decoder, lambda: layers.LayerNorm.like("cohere", HIDDEN)),
    "AddRMSNorm": (AddingDecoder, lambda: layers.AddRMSNorm(HIDDEN)),
    "AddRMSNorm on float32": (AddingDecoder, lambda: layers.AddRMSNorm(HIDDEN, residual_dtype=torch.float32)),
    "AddLayerNorm": (AddingDecoder, lambda: layers.AddLayerNorm(HIDDEN)),
    "AddLayerNorm on float32": (AddingDecoder, lambda: layers.AddLayerNorm(HIDDEN, residual_dtype=torch.float32)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_of_own_norms_is_pre_norm_with_a_final_norm(name: str, dtype: torch.dtype) -> None:
    model = _decoder(DECODERS[name][0], dtype, DECODERS[name][1])
    report = nw.check(model, (TOKENS,))
    (stack,) = report.placement.stacks
    assert (str(stack.kind), stack.sublayers, stack.final_norm) == ("pre", 8, True)
    assert [site.path for site in report.norms] == [*(f"norms.{i}" for i in range(8)), "last"]
    assert {str(site.placement) for site in report.norms[:8]} == {"pre"}
    assert str(report.norms[8].placement) == "final"
    assert {str(site.evidence) for site in report.norms} == {"verified"}
    assert [(f.name, f.message) for f in report.findings if str(f.severity) != "info"] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("over", ["head", "all_heads"])
def test_norms_of_queries_and_keys_are_seen_as_such(over: str, dtype: torch.dtype) -> None:
    qk = lambda: layers.QKNorm(HIDDEN // 2, 2, over=over)  # noqa: E731
    report = nw.map(_decoder(Decoder, dtype, lambda: layers.RMSNorm(HIDDEN), qk), (TOKENS,))
    sites = [site for site in report.norms if "qk" in site.path]
    assert [site.path for site in sites[:2]] == ["mixers.0.qk.q_norm", "mixers.0.qk.k_norm"]
    assert len(sites) == 8
    for site in sites:
        assert site.spec is not None
        assert (str(site.placement), str(site.spec.kind)) == ("qk", "rms")
        assert site.spec.axes == ((-1,) if over == "head" else (-2, -1))
        assert str(site.evidence) == "verified"


@pytest.mark.parametrize("squash", [layers.DynamicTanh, layers.Derf])
def test_a_squash_is_no_norm(squash: type[nn.Module]) -> None:
    report = nw.map(Host(squash(HIDDEN), "tokens").eval(), torch.randn(2, 7, 10))
    assert report.norms == () == report.listed_apart


# -- compiled kernels -------------------------------------------------------------------------


class Streams(nn.Module):
    """A residual stream through layers that compiled code serves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = layers.RMSNorm(HIDDEN), layers.AddRMSNorm(HIDDEN), layers.LayerNorm(HIDDEN)
        self.into, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.into(self.first(x))
        y, x = self.second(self.into(x), x)
        return self.last(x + self.out(y))


def test_what_is_found_does_not_depend_on_the_kernel() -> None:
    torch.manual_seed(0)
    model, x = Streams(), torch.randn(2, 5, HIDDEN)
    found = nw.check(model, (x,))
    with plain():
        right = nw.check(model, (x,))
    assert found.profile == right.profile
    assert found.profile
    assert all(row.residual_rms is not None and row.grad_rms is not None for row in found.profile)
    assert found.norms == right.norms
    assert found.findings == right.findings
    recorded = trace(target(model, (x,))).graph
    assert not [op.name for op in recorded.ops if op.name.startswith("normwise")]
