"""Faults in how a norm computes: eps, dtypes, the form of the variance, the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.faults.case import Case, Fault, Observed, Unfit, mixin, rows
from bench.faults.rewritten import Rewritten, rewrite
from normwise.facts.records import Place
from normwise.graph.capture import tensors_in
from normwise.spec import FAMILIES, Cast

__all__ = ["FAULTS"]


def probed(*inputs: str) -> Any:
    """Return an observation of the norms alone, on rows that the pages of the rules use."""

    def observe(case: Case) -> Observed:
        seen: Observed = {}
        for site in case.norms:
            if "#" in site.path or not site.shape or site.spec is None or site.spec.axes != (-1,):
                continue
            norm = case.module(site.path)
            x = {
                "rows": rows(site.shape[-1], case.dtype),
                "offset": rows(site.shape[-1], case.dtype)[:-1] + 1000,
                "zeros": torch.zeros(2, site.shape[-1], dtype=case.dtype),
            }
            for name in inputs:
                row = x[name].reshape(-1, *([1] * (len(site.shape) - 2)), site.shape[-1]).requires_grad_()
                try:
                    output = norm(row)
                except (RuntimeError, TypeError):  # its channels stand elsewhere, or its caller says more than x
                    continue
                seen[f"{site.path} {name}"] = output.detach()
                (gradient,) = torch.autograd.grad(output.float().sum(), row)
                seen[f"{site.path} gradient {name}"] = gradient
        return seen

    return observe


class EpsOutsideRoot(Rewritten):
    """x / (sqrt(v) + eps)."""

    def divide(self, h: Tensor) -> Tensor:
        """Add eps to the root."""
        return h / (self.square(h).sqrt() + self.eps)


class RootClamped(Rewritten):
    """x / max(sqrt(v), eps)."""

    def divide(self, h: Tensor) -> Tensor:
        """Clamp the root."""
        return h / self.square(h).sqrt().clamp(min=self.eps)


class HalfStatistics(Rewritten):
    """All of the statistics in the dtype of the input."""

    def cast(self, x: Tensor) -> Tensor:
        """Keep the dtype."""
        return x


class Cancelling(Rewritten):
    """E[x^2] - E[x]^2."""

    def mean(self, h: Tensor) -> Tensor:
        """Keep the row for the variance."""
        self.raw = h.detach()
        return h.mean(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize with the difference of two moments."""
        h = self.cast(x)
        mean = h.mean(-1, keepdim=True)
        variance = h.pow(2).mean(-1, keepdim=True) - mean.pow(2)
        return self.scale((h - mean) * torch.rsqrt(variance.clamp(min=0) + self.eps), x)


class Unbiased(Rewritten):
    """n - 1 in the denominator."""

    def square(self, h: Tensor) -> Tensor:
        """Divide by n - 1."""
        return h.pow(2).sum(-1, keepdim=True) / (h.shape[-1] - 1)


class Detached(Rewritten):
    """Statistics without a gradient."""

    def square(self, h: Tensor) -> Tensor:
        """Cut the graph."""
        return super().square(h).detach()


class NoEps(Rewritten):
    """Nothing under the root but the statistic."""

    def divide(self, h: Tensor) -> Tensor:
        """Divide by the root alone."""
        return h / self.square(h).sqrt()


class Promoting(Rewritten):
    """No cast back to the dtype of the input."""

    def scale(self, h: Tensor, x: Tensor) -> Tensor:
        """Leave float32 as it is."""
        return super().scale(h, h)


class CastBeforeGain(Rewritten):
    """The gain in the dtype of the input, after the cast."""

    def scale(self, h: Tensor, x: Tensor) -> Tensor:
        """Cast, then multiply."""
        y = h.to(x.dtype) * (self.gain + self.offset)
        return y + getattr(self, self.shift_name) if self.shift_name else y


class _Forgetful(torch.autograd.Function):
    """An RMS division whose backward leaves out the term of the statistic."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, eps: float) -> Tensor:
        """Divide by the root mean square."""
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(scale)
        return h * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Multiply by the scale alone."""
        (scale,) = ctx.saved_tensors
        return gradients[0] * scale, None


class WrongBackward(Rewritten):
    """A backward pass of its own that lacks a term."""

    def divide(self, h: Tensor) -> Tensor:
        """Divide by the fused op."""
        return _Forgetful.apply(h, self.eps)


class _Doubling(torch.autograd.Function):
    """A gain whose gradient is summed over the last rows only."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, gain: Tensor) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(h, gain)
        return h * gain

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the first sample alone."""
        h, gain = ctx.saved_tensors
        return gradients[0] * gain, (gradients[0] * h)[:1].flatten(0, -2).sum(0)


class WrongGainGradient(Rewritten):
    """The gradient of the gain misses all samples but the first."""

    def scale(self, h: Tensor, x: Tensor) -> Tensor:
        """Scale by the fused op."""
        y = _Doubling.apply(h, self.gain.to(h.dtype) + self.offset)
        return (y + getattr(self, self.shift_name).to(h.dtype) if self.shift_name else y).to(x.dtype)


def _written(kind: type[Rewritten], *kinds: str, **attributes: Any) -> Any:
    def inject(case: Case) -> list[str]:
        return rewrite(case, case.some(case.vectors(*kinds)), kind, **attributes)

    return inject


def _huge_eps(case: Case) -> list[str]:
    sites = case.some(case.vectors())
    return rewrite(case, sites, Rewritten, eps=100.0)


def _tiny_eps(case: Case) -> list[str]:
    """torch's own layer norm in float16 with the eps of BERT."""
    sites = [s for s in case.vectors("layer") if s.native and type(case.module(s.path)) is nn.LayerNorm]
    if not sites:
        raise Unfit("no nn.LayerNorm")
    sites = case.some(sites)
    for site in sites:
        case.module(site.path).eps = 1e-12
    return [s.path for s in sites]


def _mean_of_thousands(case: Case) -> list[str]:
    """A one-pass variance behind an embedding whose numbers all lie near 1000."""
    sites = rewrite(case, case.some(case.vectors("layer"), one=True), Cancelling)
    return sites


def _zero_row(case: Case) -> list[str]:
    """No eps, and a token that is embedded as zeros."""
    site = case.vectors("rms")[0]
    if site.layer != 0:
        raise Unfit("no norm reads the embedding")
    token = case.args[0] if case.args else case.kwargs[case.tokens()[0]]
    table = [m for m in case.model.modules() if isinstance(m, nn.Embedding)]
    if len(table) != 1:
        raise Unfit("not one embedding alone")
    with torch.no_grad():
        table[0].weight[int(token[0, 0])] = 0
    return rewrite(case, [site], NoEps)


def _massive(case: Case) -> list[str]:
    """Statistics in half precision and an embedding with one channel of 300: x^2 is beyond float16."""
    sites = [s for s in case.vectors() if s.layer == 0 and str(s.placement) == "pre"]
    if not sites:
        raise Unfit("no norm reads the embedding")
    tables = [m for m in case.model.modules() if isinstance(m, nn.Embedding) and m.embedding_dim == sites[0].shape[-1]]
    case.tokens()
    if not tables:
        raise Unfit("no embedding")
    with torch.no_grad():
        tables[0].weight[:, 5] = 300.0
    return rewrite(case, case.vectors(), HalfStatistics)


def _overflowing_writer(case: Case) -> list[str]:
    """A matrix before a norm so large that its product is beyond float16."""
    path = _writer(case)
    with torch.no_grad():
        case.module(path).weight.fill_(60000.0)
        if case.module(path).bias is not None:
            case.module(path).bias[3] = 60000.0
        if all(t.isfinite().all() for t in tensors_in(case.call()) if t.is_floating_point()):
            raise Unfit("what the matrix reads is too small to overflow")
    return [path]


def _near_limit(case: Case) -> list[str]:
    """A bias of 40000 in a matrix that writes into the stream."""
    path = _writer(case, bias=True)
    with torch.no_grad():
        case.module(path).bias[3] = 40000.0
    return [path]


def _writer(case: Case, *, bias: bool = False) -> str:
    """Return the last linear map of a middle sublayer."""
    members = [m for s in case.placement.stacks[:1] for m in s.members]
    if len(members) < 4:
        raise Unfit("no residual stack of four sublayers")
    width = case.placement.stacks[0].width
    for member in members[len(members) // 2 :]:
        inside = [
            (name, m)
            for name, m in case.model.named_modules()
            if name.startswith(f"{member.path}.") and isinstance(m, nn.Linear) and m.out_features == width
        ]
        inside = [(n, m) for n, m in inside if m.in_features != width and (m.bias is not None or not bias)]
        if inside:
            return inside[-1][0]
    raise Unfit("no linear map that writes into the stream")


def _casting(self: Any, x: Tensor) -> Tensor:
    return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


def _float_gain(case: Case) -> list[str]:
    """No cast back of a half-precision stream, before matrices that cast what they read."""
    if any(isinstance(m, nn.MultiheadAttention) for m in case.model.modules()):
        raise Unfit("torch's own attention refuses float32")
    for module in case.model.modules():
        if isinstance(module, nn.Linear):
            mixin(module, forward=_casting)
    return rewrite(case, case.some(case.vectors(places=(Place.BRANCH, Place.POST))), Promoting)


def _detached_norm(case: Case) -> list[str]:
    return rewrite(case, case.some(case.vectors()), Detached)


def _other_order(case: Case) -> list[str]:
    """The order of gain and cast that the family does not have."""
    name = str(getattr(case.evidence.get("config"), "model_type", "")).removesuffix("_text")
    family = FAMILIES.get(name)
    if family is None or family.cast not in (Cast.BEFORE_WEIGHT, Cast.AFTER_WEIGHT):
        raise Unfit("no family that is known for an order")
    kind = CastBeforeGain if family.cast is Cast.AFTER_WEIGHT else Rewritten
    return rewrite(case, case.some(case.vectors("rms")), kind)


FAULTS = (
    Fault(
        name="eps-outside-root", codes=("NUM004",), inject=_written(EpsOutsideRoot), observe=probed("zeros"), rows=True,
        what=("x / (sqrt(v) + eps)", "x / (sqrt(v) + eps)"),
    ),
    Fault(
        name="root-clamped", codes=("NUM004",), inject=_written(RootClamped), observe=probed("zeros"), rows=True,
        what=("x / max(sqrt(v), eps)", "x / max(sqrt(v), eps)"),
    ),
    Fault(
        name="half-statistics-fp16", codes=("NUM001",), inject=_written(HalfStatistics), dtype=torch.float16,
        observe=probed("rows"), rows=True, effects=("NUM003", "NUM002", "NUM009"),
        what=("statistics in float16", "统计量用 float16 计算"),
    ),
    Fault(
        name="half-statistics-bf16", codes=("NUM001",), inject=_written(HalfStatistics), dtype=torch.bfloat16,
        observe=probed("rows"), bits=True, information=True,
        what=("statistics in bfloat16", "统计量用 bfloat16 计算"),
    ),
    Fault(
        name="collapsed-rows", codes=("NUM002", "NUM001"), inject=_massive, dtype=torch.float16,
        effects=("NUM003", "NUM009"),
        what=("float16 statistics and one channel of 300", "float16 统计量，并有一个通道为 300"),
    ),
    Fault(
        name="eps-lost", codes=("NUM003",), inject=_written(HalfStatistics, eps=1e-8), dtype=torch.float16,
        observe=probed("zeros"), rows=True, effects=("NUM001", "NUM009"),
        what=("eps 1e-8 added in float16", "在 float16 中加上 eps 1e-8"),
    ),
    Fault(
        name="no-eps-and-a-row-of-zeros", codes=("NUM009", "NUM003", "NUM004"), inject=_zero_row, effects=("NUM003",),
        what=("no eps, and a token embedded as zeros", "没有 eps，且有一个词元嵌入为零"),
    ),
    Fault(
        name="eps-dominates", codes=("NUM005",), inject=_huge_eps, setting="loaded", effects=("CKP005",),
        what=("eps 100 in the place of its value", "eps 写成 100"),
    ),
    Fault(
        name="reciprocal-overflow", codes=("NUM006",), inject=_tiny_eps, dtype=torch.float16, information=True,
        observe=probed("zeros"), rows=True,
        what=("torch's LayerNorm in float16 with eps 1e-12", "torch 的 LayerNorm 在 float16 下用 eps 1e-12"),
    ),
    Fault(
        name="cancelling-variance", codes=("NUM007",), inject=_mean_of_thousands, information=True,
        observe=probed("offset"), what=("variance as E[x^2] - E[x]^2", "方差写成 E[x^2] - E[x]^2"),
    ),
    Fault(
        name="stream-near-limit", codes=("NUM008",), inject=_near_limit, dtype=torch.float16,
        what=("a channel of 40000 in a float16 stream", "float16 残差流中有一个 40000 的通道"),
        effects=("NUM009", "NUM001", "NUM002"),
    ),
    Fault(
        name="overflowing-writer", codes=("NUM009",), inject=_overflowing_writer, dtype=torch.float16,
        what=("a matrix whose product leaves float16", "矩阵乘积超出 float16"),
    ),
    Fault(
        name="gain-on-the-other-side-of-the-cast", codes=("NUM010",), inject=_other_order, dtype=torch.bfloat16,
        setting="loaded", information=True, observe=probed("rows"), bits=True,
        what=("gain and cast in the order that the family does not have", "增益与类型转换的次序与该模型族相反"),
    ),
    Fault(
        name="promoted-stream", codes=("NUM011",), inject=_float_gain, dtype=torch.bfloat16,
        observe=probed("rows"), rows=True,
        what=("a norm that hands on float32 in a bfloat16 model", "bfloat16 模型中归一化层输出 float32"),
    ),
    Fault(
        name="wrong-backward", codes=("NUM012",), inject=_written(WrongBackward),
        what=("a backward without the term of the statistic", "反向传播缺少统计量的那一项"),
    ),
    Fault(
        name="wrong-gain-gradient", codes=("NUM012",), inject=_written(WrongGainGradient),
        what=("a gain gradient of the first sample alone", "增益的梯度只来自第一个样本"),
    ),
    Fault(
        name="detached-statistics", codes=("NUM012",), inject=_detached_norm,
        what=("statistics without a gradient", "统计量不参与求导"),
    ),
    Fault(
        name="unbiased-variance", codes=("AXS008", "CKP006"), inject=_written(Unbiased), setting="referenced",
        what=("n - 1 in the variance, beside a reference with n", "方差除以 n - 1，而参考模型除以 n"),
    ),
)  # fmt: skip
