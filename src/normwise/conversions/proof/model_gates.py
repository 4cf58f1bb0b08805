"""The gates on the model itself: its own weights in float64, its own dtype, and what was saved of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normwise.conversions.proof.compare import Outputs, centred, floats_in, gap
from normwise.conversions.proof.double import seed
from normwise.conversions.proof.subject import EXACT, NOT_EXACT, Gate, Subject, said
from normwise.facts.differences import relative_change
from normwise.graph.guard import as_found
from normwise.rendering import both
from normwise.targets import Target

__all__ = ["dtype", "reload_gate", "weights"]

_MANY = 256  # numbers of an output, from which the ratio of two rounding errors says something


def weights(subject: Subject) -> Gate:
    """Compare on the model's own weights in float64; a mean of the stream costs digits, which the bound allows for."""
    if (refused := subject.no_numbers("weights")) is not None:
        return refused
    try:
        offset = _offset(subject)
    except Exception as error:  # the model's own code
        told = both(f"the model does not run in float64: {said(error)}", f"模型无法以 float64 运行：{said(error)}")
        return Gate("weights", None, {}, told)
    try:
        found = subject.gaps(subject.reference, subject.answer)
    except Exception as error:  # a wrong plan may fail anywhere
        return Gate("weights", False, {}, both(f"the conversion fails: {said(error)}", f"转换失败：{said(error)}"))
    bound = EXACT * (1 + offset)
    worst = max(found, key=lambda name: found[name], default="")
    figures = {"gap": found.get(worst, 0.0), "bound": bound, "mean/std": offset, "weights": str(subject.target.weights)}
    if not subject.plan.exact:
        return Gate("weights", None, figures, NOT_EXACT)
    if not found:
        en = "the model returns no floating-point tensor to compare: wrap it so that it returns one, its logits"
        return Gate("weights", False, figures, both(en, "模型没有返回可比较的浮点张量：请包装模型，使其返回 logits 等"))
    passed = found[worst] <= bound
    apart = both(f"{worst} is apart by {figures['gap']:.1e}", f"{worst} 相差 {figures['gap']:.1e}")
    return Gate(
        "weights",
        passed,
        figures,
        both("the model's own weights in float64", "模型自身权重，float64") if passed else apart,
    )


def _offset(subject: Subject) -> float:
    """Return the largest |mean| / standard deviation of what a norm reads, of the median token."""
    found = [0.0]

    def watch(axes: tuple[int, ...]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter(floats_in((args, kwargs)).values()), None)
            if x is not None and x.dim() >= -min(axes):
                ratio = x.mean(axes).abs() / x.std(axes, correction=0)
                ratio = ratio[ratio.isfinite()]
                found.append(float(ratio.median()) if ratio.numel() else 0.0)

        return hook

    modules = dict(subject.exact.named_modules(remove_duplicate=False))
    sites = {site.path.partition("#")[0]: site.spec.axes for site in subject.norms if site.spec}
    hooks = [modules[p].register_forward_pre_hook(watch(axes), with_kwargs=True) for p, axes in sites.items()]
    try:
        subject.reference  # noqa: B018 - the run that the hooks watch
    finally:
        for hook in hooks:
            hook.remove()
    return max(found)


# -- the working dtype -----------------------------------------------------------------------


def dtype(subject: Subject) -> Gate:
    """Compare both models' own rounding errors: those of the converted one are at most twice the original's."""
    if (refused := subject.no_numbers("dtype")) is not None:
        return refused
    if not subject.plan.exact:
        return Gate("dtype", None, {}, NOT_EXACT)
    working = next((p.dtype for p in subject.target.model.parameters() if p.is_floating_point()), torch.float32)
    try:
        shifted = subject.shifted(subject.reference, subject.answer)
        own = centred(_plain_run(subject.target.model, subject.target), shifted)
    except Exception as error:  # the model's own code
        told = both(f"the original does not run: {said(error)}", f"原模型无法运行：{said(error)}")
        return Gate("dtype", None, {}, told)
    try:
        new = centred(_plain_run(subject.converted, subject.target), shifted)
    except Exception as error:  # a wrong plan may fail anywhere
        told = both(f"the converted model does not run: {said(error)}", f"转换后的模型无法运行：{said(error)}")
        return Gate("dtype", False, {}, told)
    expected = centred(subject.reference, shifted)
    unit = EXACT / 2 if working is torch.float64 else torch.finfo(working).eps
    errors = {
        n: (relative_change(expected[n], own[n]), relative_change(expected[n], new[n]))
        for n in expected
        if n in own and n in new
    }
    over = {n: after / (2 * before + _luck(expected[n]) * unit) for n, (before, after) in errors.items()}
    if not over:
        return Gate("dtype", None, {}, both("there is no output to compare", "没有可比较的输出"))
    worst = max(over, key=lambda name: over[name])
    before, after = errors[worst]
    figures = {
        "dtype": str(working).removeprefix("torch."),
        "original": before,
        "converted": after,
        **_answers(expected, own, new),
    }
    why = both(
        f"{worst}: error {before:.1e} before, {after:.1e} after",
        f"{worst}：误差转换前 {before:.1e}，转换后 {after:.1e}",
    )
    return Gate("dtype", over[worst] <= 1, figures, why)


def _luck(output: torch.Tensor) -> int:
    """Return how many roundings the error of an output may owe to luck: that of a few numbers may be 0."""
    return 2 if output.numel() >= _MANY else 16


def _plain_run(model: nn.Module, target: Target) -> Outputs:
    with as_found(model, inputs=(target.args, target.kwargs)), torch.inference_mode():
        seed()
        return floats_in(target.run(model))


def _answers(expected: Outputs, own: Outputs, new: Outputs) -> dict[str, float]:
    """Return how far the first output's largest entries and distributions are kept, taken as logits."""
    name = "logits" if "logits" in expected else next(iter(expected))
    if expected[name].dim() < 2 or expected[name].shape[-1] < 2 or expected[name].is_complex():
        return {}
    best, logs = own[name].argmax(-1), expected[name].double().log_softmax(-1)
    apart = nn.functional.kl_div(new[name].double().log_softmax(-1), logs, reduction="none", log_target=True)
    agree = (new[name].argmax(-1) == best).double().mean()
    return {"argmax": float(agree), "KL": max(float(apart.sum(-1).mean()), 0.0)}


# -- reload ----------------------------------------------------------------------------------


def reload_gate(load: Callable[[], nn.Module], converted: nn.Module, target: Target) -> Gate:
    """Return the gate of a saved model: the same keys and tensors, and bit for bit the same outputs.

    Args:
        load: loads what was written, as its user will.
        converted: the model in memory.
        target: gives the inputs.
    """
    try:
        loaded = load()
    except Exception as error:
        return Gate("reload", False, {}, both(f"it cannot be loaded: {said(error)}", f"无法加载：{said(error)}"))
    mine, theirs = converted.state_dict(), loaded.state_dict()
    missing, unexpected = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    other = sorted(k for k in mine.keys() & theirs.keys() if not _same(mine[k], theirs[k]))
    try:
        own, new = (_plain_run(model, target) for model in (converted, loaded))
    except Exception as error:
        return Gate("reload", False, {}, both(f"it does not run: {said(error)}", f"无法运行：{said(error)}"))
    figures = {
        "missing": len(missing),
        "unexpected": len(unexpected),
        "other tensors": len(other),
        "gap": gap(own, new),
    }
    same = own.keys() == new.keys() and all(_same(own[name], new[name]) for name in own)
    faults = {"missing": missing, "unexpected": unexpected, "other": other}
    told = "; ".join(f"{what}: {', '.join(keys[:3])}" for what, keys in faults.items() if keys)
    if told or not same:
        return Gate("reload", False, figures, told or both("the outputs differ", "输出不同"))
    return Gate("reload", True, figures, both("loaded again, bit for bit the same", "重新加载后逐位相同"))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bool(((one == other) | ((one != one) & (other != other))).all())
    )
