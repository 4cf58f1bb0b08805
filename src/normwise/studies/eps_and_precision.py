"""What eps and half precision do to a norm

## Claim
It matters little where eps stands and how large it is; too small an eps gives NaN; statistics belong in float32; a
variance may be taken as E[x^2] - E[x]^2; the gain may be multiplied before or after the cast.

## Source
Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167 (eps under the root); Micikevicius et al. 2018,
https://arxiv.org/abs/1710.03740 (statistics in float32); Chan, Golub and LeVeque 1983,
https://doi.org/10.1080/00031305.1983.10483115 (variance in one pass); the documentation of ``torch.nn.RMSNorm``.

## Method
No training: norms of 64 random vectors of 512, each against float64. With eps under the root the output's RMS is
sigma / sqrt(sigma^2 + eps), behind it sigma / (sigma + eps). The one-pass variance of float32 loses about
2^-24 (mean / sigma)^2. The Jacobian of a LayerNorm at a constant vector has the norm 1 / sqrt(eps). "Naive" is the
formula with every operation in half precision. The eps of ``RMSNorm(eps=None)`` is read off the output of bfloat16
vectors.

## What would refute it
RMS that differ by sigma though sigma is far above sqrt(eps); finite squares above 256 in float16; a one-pass variance
that is right at mean / sigma of 10000; gains that differ in no bit.

## Cost
Full: 69 trials, 4 CPU-seconds. Quick: 2 CPU-seconds.

## What this cannot show
What such errors do to a long training; other devices' reductions and fast-math; float8.
"""

from __future__ import annotations

from dataclasses import replace
from math import isnan, sqrt
from typing import Any

import torch
from torch import nn

from normwise.layers import LayerNorm, RMSNorm
from normwise.rendering import both
from normwise.rendering.plots import Chart, Line
from normwise.studies._curves import across
from normwise.studies._outcomes import outcome
from normwise.studies._study import Claim, Judgement, Outcome, Params, Rows, Table

ZH = """eps 与半精度对归一化的影响

## 主张
eps 的位置与大小无关紧要；eps 太小会得到 NaN；统计量应以 float32 计算；方差可以取 E[x^2] - E[x]^2；
增益在类型转换之前或之后相乘都可以。

## 出处
Ioffe 与 Szegedy 2015，https://arxiv.org/abs/1502.03167（eps 在根号内）；Micikevicius 等 2018，
https://arxiv.org/abs/1710.03740（统计量用 float32）；Chan、Golub 与 LeVeque 1983，
https://doi.org/10.1080/00031305.1983.10483115（一遍计算方差）；``torch.nn.RMSNorm`` 的文档。

## 方法
没有训练：64 个 512 维随机向量的归一化，与 float64 对照。eps 在根号内时输出的 RMS 为 sigma / sqrt(sigma^2 + eps)，
在根号外为 sigma / (sigma + eps)。float32 的一遍方差约损失 2^-24 (mean / sigma)^2。LayerNorm 在常向量处的雅可比范数为
1 / sqrt(eps)。误差的对照是每一步运算都用半精度的公式。``RMSNorm(eps=None)`` 的 eps 由 bfloat16 向量的输出反推。

## 什么会推翻它
sigma 远大于 sqrt(eps) 时 RMS 仍然不同；float16 中 256 以上的平方仍有限；mean / sigma 为 10000 时一遍方差仍正确；
增益的结果逐位相同。

## 开销
完整集：69 次试验，4 CPU 秒。快速集：2 CPU 秒。

## 这里无法说明的
这些误差对长时间训练的影响；其他设备的归约与快速数学；float8。
"""

VERSION = 1
DATA = ()
SEEDS = 3

_SIGMAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
_EPS = 1e-5
_MAGNITUDES = (1.0, 100.0, 250.0, 260.0, 1000.0)
_RATIOS = (1.0, 10.0, 100.0, 1000.0, 10000.0)
_SMALL_EPS = (1e-5, 1e-6, 1e-8)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_DIFFERENCE = 0.01  # of the RMS: a hundredth is less than the rounding of bfloat16, 2^-8, twice over
_LARGEST_SQUARED = sqrt(torch.finfo(torch.float16).max)  # 255.9


def trials(quick: bool) -> list[dict[str, Any]]:
    """Return every part at every setting; the small set differs in its seeds alone."""
    return [
        *({"part": "sigma", "sigma": sigma} for sigma in _SIGMAS),
        *({"part": "magnitude", "magnitude": size} for size in _MAGNITUDES),
        *({"part": "ratio", "ratio": ratio} for ratio in _RATIOS),
        *({"part": "eps", "eps": eps} for eps in _SMALL_EPS),
        *({"part": "cast", "dtype": dtype} for dtype in ("float16", "bfloat16")),
        *({"part": "default", "dtype": dtype} for dtype in ("float32", "bfloat16")),
    ]


def seconds(params: Params) -> float:
    """Return the CPU-seconds of a trial."""
    return 0.05


@torch.no_grad()
def measure(params: Params) -> dict[str, Any]:
    """Run one trial."""
    torch.manual_seed(params["seed"])
    x = torch.randn(64, 512, dtype=torch.float64)
    x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True, correction=0)
    match params["part"]:
        case "sigma":
            return _sigma(x * params["sigma"])
        case "magnitude":
            return _magnitude(x / x.abs().amax(-1, keepdim=True) * params["magnitude"])
        case "ratio":
            return _ratio(x + params["ratio"])
        case "eps":
            return _eps(params["eps"])
        case "cast":  # not of RMS 1, or a cast before the gain would have nothing to round
            return _cast(x * sqrt(3), _DTYPES[params["dtype"]])
        case _:
            return _default(x, _DTYPES[params["dtype"]])


def _sigma(x: torch.Tensor) -> dict[str, Any]:
    inside = LayerNorm(512, eps=_EPS)
    outside = LayerNorm(512, eps=_EPS, spec=replace(inside.spec, eps_inside=False))
    return {"inside": _rms(inside(x.float())), "outside": _rms(outside(x.float()))}


def _magnitude(x: torch.Tensor) -> dict[str, Any]:
    half = x.half()
    exact = half.double() / half.double().square().mean(-1, keepdim=True).sqrt()
    naive = half * torch.rsqrt((half * half).mean(-1, keepdim=True))
    ours = RMSNorm(512, eps=0.0, dtype=torch.float16)(half)
    return {
        "finite_squares": int((half * half).isfinite().all()),
        "naive_error": _error(naive, exact),
        "error": _error(ours, exact),
    }


def _ratio(x: torch.Tensor) -> dict[str, Any]:
    single = x.float()
    exact = single.double().var(-1, correction=0)
    once = single.square().mean(-1) - single.mean(-1).square()
    return {
        "one_pass": ((once.double() - exact).abs() / exact).mean().item(),
        "two_pass": ((single.var(-1, correction=0).double() - exact).abs() / exact).mean().item(),
        "negative": int((once < 0).sum()),
    }


def _eps(eps: float) -> dict[str, Any]:
    zeros, half = torch.zeros(512), torch.zeros(512, dtype=torch.float16)
    with torch.enable_grad():
        norm = LayerNorm(512, eps=eps, elementwise_affine=False)
        jacobian = torch.autograd.functional.jacobian(norm, zeros.double())
    assert isinstance(jacobian, torch.Tensor)
    return {
        "in_float16": torch.tensor(eps).half().item(),
        "naive_float16": (half * torch.rsqrt(half.square().mean() + torch.tensor(eps).half()))[0].item(),
        "naive_float32": (zeros * torch.rsqrt(zeros.square().mean() + eps))[0].item(),
        "jacobian": torch.linalg.matrix_norm(jacobian, 2).item(),
    }


def _cast(x: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    gain = (1 + 0.1 * torch.randn(512)).to(dtype)
    last, first = RMSNorm(512, eps=1e-6, dtype=dtype), RMSNorm.like("llama", 512).to(dtype)
    for norm in (last, first):
        norm.load_state_dict({"weight": gain})
    late, early = (norm(x.to(dtype)).double() for norm in (last, first))
    kind = torch.finfo(dtype)
    unit = kind.eps * torch.exp2(late.abs().clamp_min(kind.tiny).log2().floor())  # from one number to the next
    return {
        "differing": (late != early).double().mean().item(),
        "units": ((late - early).abs() / unit).max().item(),
    }


def _default(x: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    small = (x * 1e-3).to(dtype)
    square = small.double().square().mean(-1)
    found = {}
    for name, norm in (("torch", nn.RMSNorm(512)), ("ours", RMSNorm(512))):
        output = norm.to(dtype)(small).double().square().mean(-1)
        found[name] = (square * (1 / output - 1)).mean().item()
    return found


def _rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return (found.double() - exact).abs().max().item()


def _inside(sigma: float) -> float:
    return sigma / sqrt(sigma**2 + _EPS)


def _outside(sigma: float) -> float:
    return sigma / (sigma + _EPS)


def _place(rows: Rows) -> Judgement:
    cells = [(sigma, rows.where(part="sigma", sigma=sigma)) for sigma in _SIGMAS]
    found = [(sigma, cell.mean("inside"), cell.mean("outside")) for sigma, cell in cells]
    differs = [abs(inside - outside) > _DIFFERENCE for _, inside, outside in found]
    said = [f"{inside:.3g} / {outside:.3g}" for _, inside, outside in found]
    first = differs.index(True) if any(differs) else -1
    return Judgement(
        outcome(not each for each in differs),
        both(
            f"RMS with eps inside / outside: {said[0]} at sigma {_SIGMAS[0]:g}, {said[first]} at {_SIGMAS[first]:g}, "
            f"{said[-1]} at {_SIGMAS[-1]:g}; it counts from where sigma comes near sqrt(eps) = {sqrt(_EPS):.1e}",
            f"eps 在根号内 / 外的 RMS：sigma 为 {_SIGMAS[0]:g} 时 {said[0]}，{_SIGMAS[first]:g} 时 {said[first]}，"
            f"{_SIGMAS[-1]:g} 时 {said[-1]}；当 sigma 接近 sqrt(eps) = {sqrt(_EPS):.1e} 时才有影响",
        ),
    )


def _too_small(rows: Rows) -> Judgement:
    of = rows.where(part="eps", eps=1e-8)
    half, single = (any(map(isnan, of.values(name))) for name in ("naive_float16", "naive_float32"))
    bound = of.mean("jacobian")
    return Judgement(
        outcome((half, single)),
        both(
            f"1e-8 is {of.mean('in_float16'):g} in float16, where a vector of zeros gives {_nan(half)}; in float32 "
            f"it gives {_nan(single)}. The Jacobian reaches {bound:.4g} (1 / sqrt(eps) = 1e4)",
            f"1e-8 在 float16 中为 {of.mean('in_float16'):g}，零向量得到 {_nan(half)}；"
            f"在 float32 中得到 {_nan(single)}。雅可比达到 {bound:.4g}（1 / sqrt(eps) = 1e4）",
        ),
    )


def _nan(found: bool) -> str:
    return "NaN" if found else "0"


def _single(rows: Rows) -> Judgement:
    cells = [(size, rows.where(part="magnitude", magnitude=size)) for size in _MAGNITUDES]
    large = [cell.mean("finite_squares") == 0 for size, cell in cells if size > _LARGEST_SQUARED]
    small = [cell.mean("finite_squares") == 1 for size, cell in cells if size <= _LARGEST_SQUARED]
    found = Outcome.CONFIRMED if all(large) and all(small) else Outcome.DEPENDS if any(large) else Outcome.REFUTED
    size, cell = max((each for each in cells if each[0] <= _LARGEST_SQUARED), key=lambda each: each[0])
    above, beyond = min((each for each in cells if each[0] > _LARGEST_SQUARED), key=lambda each: each[0])
    naive, ours = ([each.mean(name) for each in (cell, beyond)] for name in ("naive_error", "error"))
    return Judgement(
        found,
        both(
            f"float16 squares overflow above {_LARGEST_SQUARED:.1f}: with a largest element of {size:g} and {above:g} "
            f"the error is {naive[0]:.1e} and {naive[1]:.1e} in float16, {ours[0]:.1e} and {ours[1]:.1e} with "
            "statistics in float32",
            f"float16 的平方在 {_LARGEST_SQUARED:.1f} 以上溢出：最大元素为 {size:g} 与 {above:g} 时，"
            f"全部用 float16 的误差为 {naive[0]:.1e} 与 {naive[1]:.1e}，"
            f"统计量用 float32 时为 {ours[0]:.1e} 与 {ours[1]:.1e}",
        ),
    )


def _one_pass(rows: Rows) -> Judgement:
    cells = [(ratio, rows.where(part="ratio", ratio=ratio)) for ratio in _RATIOS]
    bad = [cell.mean("one_pass") > _DIFFERENCE for _, cell in cells]
    first = bad.index(True) if any(bad) else -1
    said = [f"{cell.mean('one_pass'):.1e}" for _, cell in cells]
    two = max(cell.mean("two_pass") for _, cell in cells)
    return Judgement(
        outcome(not each for each in bad),
        both(
            f"relative error of the variance in one pass: {said[0]} at mean / sigma = {_RATIOS[0]:g}, {said[first]} at "
            f"{_RATIOS[first]:g}; in two passes at most {two:.1e}",
            f"一遍计算的方差的相对误差：mean / sigma 为 {_RATIOS[0]:g} 时 {said[0]}，"
            f"{_RATIOS[first]:g} 时 {said[first]}；两遍计算至多 {two:.1e}",
        ),
    )


def _gain(rows: Rows) -> Judgement:
    cells = [(dtype, rows.where(part="cast", dtype=dtype)) for dtype in ("float16", "bfloat16")]
    differs = any(cell.mean("differing") > 0 for _, cell in cells)
    said = ", ".join(f"{dtype}: {c.mean('differing'):.0%}, {c.spread('units')[1]:.0f}" for dtype, c in cells)
    return Judgement(
        Outcome.REFUTED if differs else Outcome.CONFIRMED,
        both(
            f"outputs that differ, and by how many units in the last place at most: {said}",
            f"不同的输出的比例，以及至多相差多少个末位单位：{said}",
        ),
    )


def _docs(rows: Rows) -> Judgement:
    found = rows.where(part="default", dtype="bfloat16").mean("torch")
    by_input, by_single = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps
    near = [abs(found / eps - 1) < 0.1 for eps in (by_input, by_single)]
    return Judgement(
        Outcome.CONFIRMED if near[0] else Outcome.REFUTED if near[1] else Outcome.OPEN,
        both(
            f"bfloat16 inputs: {found:.2e}; float32's is {by_single:.2e}, bfloat16's {by_input:.1e} "
            "(torch of this run)",
            f"bfloat16 输入：{found:.2e}；float32 的为 {by_single:.2e}，bfloat16 的为 {by_input:.1e}"
            "（本次运行的 torch）",
        ),
    )


CLAIMS = (
    Claim(
        both("eps inside or outside the root is the same", "eps 在根号内或外都一样"),
        "Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167",
        _place,
    ),
    Claim(both("Too small an eps gives NaN", "eps 太小会得到 NaN"), "Question 59 of docs/questions.md", _too_small),
    Claim(
        both("Statistics belong in float32", "统计量应以 float32 计算"),
        "Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740",
        _single,
    ),
    Claim(
        both("A variance may be taken as E[x^2] - E[x]^2", "方差可以取 E[x^2] - E[x]^2"),
        "Chan, Golub and LeVeque 1983, https://doi.org/10.1080/00031305.1983.10483115",
        _one_pass,
    ),
    Claim(
        both("The gain may be multiplied before or after the cast", "增益在类型转换之前或之后相乘都一样"),
        "Question 58 of docs/questions.md",
        _gain,
    ),
    Claim(
        both("RMSNorm without eps takes the machine epsilon of its input", "未给 eps 的 RMSNorm 取输入类型的机器精度"),
        "https://docs.pytorch.org/docs/stable/generated/torch.nn.RMSNorm.html",
        _docs,
    ),
)


def _lines(rows: Rows, part: str, parameter: str, metric: str, name: str) -> Line:
    x = rows.where(part=part).distinct(parameter)
    return across(name, [(value, rows.where(**{"part": part, parameter: value})) for value in x], metric)


def _sigma_chart(rows: Rows) -> Chart:
    lines = []
    for metric, name, theory in (
        ("inside", both("eps inside", "eps 在内"), _inside),
        ("outside", both("eps outside", "eps 在外"), _outside),
    ):
        line = _lines(rows, "sigma", "sigma", metric, name)
        formula = "sigma / sqrt(sigma^2 + eps)" if metric == "inside" else "sigma / (sigma + eps)"
        lines += [line, Line(name=formula, x=line.x, y=tuple(map(theory, line.x)), theory=True, like=name)]
    return Chart(
        title=both(f"RMS of a LayerNorm's output, eps {_EPS:g}", f"LayerNorm 输出的 RMS，eps {_EPS:g}"),
        x_label=both("sigma of the input", "输入的 sigma"),
        y_label=both("RMS of the output", "输出的 RMS"),
        lines=tuple(lines),
        log_x=True,
        log_y=True,
        note=both("64 vectors of 512, float32", "64 个 512 维向量，float32"),
    )


def _ratio_chart(rows: Rows) -> Chart:
    once = _lines(rows, "ratio", "ratio", "one_pass", both("E[x^2] - E[x]^2", "E[x^2] - E[x]^2"))
    theory = tuple(2**-24 * ratio**2 for ratio in once.x)
    return Chart(
        title=both("Error of a variance in float32", "float32 中方差的误差"),
        x_label=both("mean / sigma", "mean / sigma"),
        y_label=both("relative error", "相对误差"),
        lines=(
            once,
            Line(name="2^-24 (mean / sigma)^2", x=once.x, y=theory, theory=True, like=once.name),
            _lines(rows, "ratio", "ratio", "two_pass", both("two passes", "两遍")),
        ),
        log_x=True,
        log_y=True,
        note=both("64 vectors of 512, against float64", "64 个 512 维向量，与 float64 对照"),
    )


def _eps_table(rows: Rows) -> Table:
    cells = [(eps, rows.where(part="eps", eps=eps)) for eps in _SMALL_EPS]
    return Table(
        title=both("eps in float16, and how steep the norm is", "float16 中的 eps 与归一化的陡峭程度"),
        columns=(
            "eps",
            both("in float16", "float16 中"),
            both("norm of the Jacobian", "雅可比的范数"),
            "1 / sqrt(eps)",
        ),
        rows=tuple((e, cell.mean("in_float16"), cell.mean("jacobian"), e**-0.5) for e, cell in cells),
        note=both("LayerNorm of 512 at a vector of zeros, float64", "512 维 LayerNorm，零向量处，float64"),
    )


FIGURES = (_eps_table, _sigma_chart, _ratio_chart)
