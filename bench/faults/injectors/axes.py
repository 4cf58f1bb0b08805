"""Faults in which values share a statistic: the batch, the time axis, padding, one element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bench.faults.case import Case, Fault, Unfit, swap
from bench.faults.injectors.arithmetic import probed
from bench.faults.rewritten import Rewritten, rewrite
from normwise.facts.records import Place

__all__ = ["FAULTS"]


class Shared(Rewritten):
    """Statistics over more axes than the last."""

    axes: tuple[int, ...] = (-1,)

    def mean(self, h: Tensor) -> Tensor:
        """Return the mean over all the axes."""
        return h.mean(self.axes, keepdim=True)

    def square(self, h: Tensor) -> Tensor:
        """Return the mean square over all the axes."""
        return h.pow(2).mean(self.axes, keepdim=True)


class OneStep(Rewritten):
    """Another formula for a single step."""

    def square(self, h: Tensor) -> Tensor:
        """Take the statistic of a single step over a squeezed axis."""
        if h.shape[1] == 1:
            return h.pow(2).mean(-1, keepdim=True) * 1.5
        return super().square(h)


class Forgetful(Rewritten):
    """Statistics of single numbers."""

    def mean(self, h: Tensor) -> Tensor:
        """Return each number as its own mean."""
        return h.unsqueeze(-1).mean(-1)

    def square(self, h: Tensor) -> Tensor:
        """Return each number as its own mean square."""
        return h.unsqueeze(-1).pow(2).mean(-1)


class Declared(Shared):
    """A normalized_shape that the statistics do not follow."""


class TimeAsChannel(nn.Module):
    """BatchNorm1d on [B, T, H]: T is taken for the channels."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(steps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return self.norm(x)


def _stream(case: Case) -> list[Any]:
    """Return norms of a sequence model that stand on the stream, [B, T, H]."""
    case.sequences()
    found = [s for s in case.vectors() if len(s.shape) == 3 and s.placement is not Place.QK]
    if not found:
        raise Unfit("no norm of [B, T, H]")
    return found


def causal(case: Case, name: str) -> bool:
    """Whether later tokens of an input leave the earlier outputs of the same steps alone."""
    first, second = _outputs(case), _outputs(_with_another_end(case, name))
    steps = _ids(case, name).shape[1]
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.ndim == 3 and a.shape[1] == steps]
    return bool(pairs) and all(float((a - b)[:, :-1].abs().max()) <= 1e-5 * float(a.abs().max()) for a, b in pairs)


def _ids(case: Case, name: str) -> Tensor:
    return case.args[int(name)] if name.isdigit() else case.kwargs[name]


def _with_another_end(case: Case, name: str) -> Case:
    twin = case.copied()
    ids = _ids(twin, name).clone()
    ids[:, -1] = (ids[:, -1] + 1) % 40 + 3
    if name.isdigit():
        twin.args = tuple(ids if i == int(name) else value for i, value in enumerate(twin.args))
    else:
        twin.kwargs[name] = ids
    return twin


def _outputs(case: Case) -> list[Tensor]:
    from normwise.graph.capture import tensors_in

    with torch.no_grad():
        return [t for t in tensors_in(case.call()) if t.is_floating_point()]


def _behind(case: Case, names: list[str], sites: list[Any]) -> list[Any]:
    """Return the norms whose own input follows the last token of one of the inputs."""
    from normwise.graph.capture import tensors_in

    def read(seen: Case) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        hooks = [
            seen.module(s.path).register_forward_pre_hook(
                lambda module, args, kwargs, path=s.path: held.update({path: next(tensors_in((args, kwargs)))}),
                with_kwargs=True,
            )
            for s in sites
        ]
        _outputs(seen)
        for hook in hooks:
            hook.remove()
        return held

    first, others = read(case), [read(_with_another_end(case, name)) for name in names]
    return [s for s in sites if any(not torch.equal(first[s.path], other[s.path]) for other in others)]


def _of_causal(case: Case) -> list[Any]:
    """Return the norms of the stream that a causal part reads.

    Raises:
        Unfit: nothing here is causal.
    """
    names = [name for name in case.tokens() if causal(case, name)]
    found = _behind(case, names, _stream(case)) if names else []
    if not found:
        raise Unfit("not causal")
    return found


def _of_encoder(case: Case) -> list[Any]:
    """Return the norms of the stream that later tokens may reach.

    Raises:
        Unfit: all that reads tokens is causal.
    """
    names = {name: causal(case, name) for name in case.tokens()}
    sites = _stream(case)
    decoding = {s.path for s in _behind(case, [n for n, held in names.items() if held], sites)}
    found = [s for s in _behind(case, [n for n, held in names.items() if not held], sites) if s.path not in decoding]
    if not found:
        raise Unfit("causal")
    return found


def _over(*axes: int, where: str) -> Any:
    def inject(case: Case) -> list[str]:
        sites = _of_causal(case) if where == "causal" else _of_encoder(case)
        return rewrite(case, case.some(sites), Shared, axes=axes)

    return inject


def _batch(case: Case) -> list[str]:
    sites = [s for s in case.vectors() if len(s.shape) >= 3 and s.shape[0] > 1]
    if not sites:
        raise Unfit("no norm whose first axis is the batch")
    return rewrite(case, case.some(sites), Shared, axes=(0, -1))


def _padded(case: Case) -> list[str]:
    try:
        sites = _of_encoder(case)
    except Unfit as unfit:
        raise Unfit("causal: padding behind a sample is the future") from unfit
    return rewrite(case, case.some(sites), Shared, axes=(1, -1))


def _decoding(case: Case) -> list[str]:
    if not hasattr(case.model, "generate"):
        raise Unfit("no decoder with a cache")
    return rewrite(case, case.some(_of_causal(case)), OneStep)


def _degenerate(case: Case) -> list[str]:
    sites = case.vectors("layer", "rms")
    return rewrite(case, case.some(sites, one=True), Forgetful)


def _channels(case: Case) -> list[str]:
    (site, *_) = case.some(_stream(case), one=True)
    swap(case, site.path, TimeAsChannel(site.shape[1]))
    return [site.path, f"{site.path}.norm"]


def _unlike_declared(case: Case) -> list[str]:
    sites = _stream(case)
    paths = rewrite(case, case.some(sites), Declared, axes=(1, -1))
    for path in paths:
        norm = case.module(path)
        norm.normalized_shape = (norm.gain.shape[0],)
    return paths


def _batch_statistics(case: Case) -> list[str]:
    """Batch norms without running statistics."""
    sites = case.some(case.batch_norms())
    for site in sites:
        norm = case.module(site.path)
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = None
    return [s.path for s in sites]


FAULTS = (
    Fault(
        name="statistics-over-the-batch", codes=("AXS001",), inject=_batch, effects=("AXS002",),
        what=("statistics over samples", "统计量跨样本"),
    ),
    Fault(
        name="batch-norm-without-running-statistics", codes=("AXS001",), inject=_batch_statistics,
        what=("a batch norm that evaluates with the batch", "批归一化在评估时用批统计量"),
    ),
    Fault(
        name="statistics-over-time", codes=("AXS002",), inject=_over(1, -1, where="encoder"),
        what=("statistics over all steps of an encoder", "编码器的统计量跨所有时间步"),
    ),
    Fault(
        name="future-in-statistics", codes=("AXS003",), inject=_over(1, -1, where="causal"),
        effects=("AXS005", "AXS002"),
        what=("statistics over all steps of a causal model", "因果模型的统计量跨所有时间步"),
    ),
    Fault(
        name="statistics-over-time-alone", codes=("AXS003",), inject=_over(1, where="causal"),
        effects=("AXS005", "AXS002", "AXS007"),
        what=("statistics over time instead of the features of a causal model", "因果模型用时间轴代替特征轴"),
    ),
    Fault(
        name="padding-in-statistics", codes=("AXS004",), inject=_padded, setting="padded", effects=("AXS002",),
        what=("padding enters the statistics", "补齐进入统计量"),
    ),
    Fault(
        name="another-formula-when-decoding", codes=("AXS005",), inject=_decoding, observe=probed("rows"),
        what=("a single step is normalized otherwise", "单个时间步用另一公式"),
    ),
    Fault(
        name="channel-is-time", codes=("AXS006",), inject=_channels, effects=("BNS003",),
        what=("BatchNorm1d(T) on [B, T, H]", "BatchNorm1d(T) 用在 [B, T, H] 上"),
    ),
    Fault(
        name="statistics-of-one-number", codes=("AXS007",), inject=_degenerate,
        effects=("NUM005", "DYN002", "AXS009"),
        what=("statistics over one element", "统计量只含一个元素"),
    ),
    Fault(
        name="unlike-its-declaration", codes=("AXS009",), inject=_unlike_declared,
        effects=("AXS002", "AXS003", "AXS005"),
        what=("normalized_shape says H, the statistics span T and H", "normalized_shape 为 H，统计量却跨 T 与 H"),
    ),
)  # fmt: skip
