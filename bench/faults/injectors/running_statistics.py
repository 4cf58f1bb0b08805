"""Faults of batch norms: buffers, modes, batches."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.faults.case import Case, Fault, Observed, Unfit, mixin
from bench.faults.settings import loss_of
from normwise.graph.capture import tensors_in

__all__ = ["FAULTS"]


def _norms(case: Case, *, one: bool = False) -> list[Any]:
    return [case.module(s.path) for s in case.some(case.batch_norms(), one=one)]


def _paths(case: Case, norms: list[Any]) -> list[str]:
    return [path for path, module in case.model.named_modules() if module in norms]


def buffers_after_a_step(case: Case) -> Observed:
    """Return outputs, and the running statistics after one ``train_step``."""
    twin = case.copied()
    twin.evidence.get("train_step", _forward)(twin.model, *twin.args, **twin.kwargs)
    return {name: b.detach().clone().double() for name, b in twin.model.named_buffers()}


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    model(*args, **kwargs)


def evaluated(case: Case) -> Observed:
    """Return what ``eval_fn`` yields and the buffers behind it."""
    twin = case.copied()
    value = twin.evidence["eval_fn"](twin.model, [batch[0] for batch in twin.evidence["loader"]])
    return {"loss": value} | {name: b.detach().clone().double() for name, b in twin.model.named_buffers()}


class _Forgot:
    """An evaluation that forgot ``model.eval()``."""

    def __call__(self, model: nn.Module, batches: Any) -> Tensor:
        with torch.no_grad():
            made = [next(iter(tensors_in(model(batch)))).float().square().mean() for batch in batches]
        return torch.stack(made).mean()


def _no_eval(case: Case) -> list[str]:
    paths = [s.path for s in case.batch_norms()]
    case.model.train()
    case.evidence["eval_fn"] = _Forgot()
    return paths


def _live_forward(self: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps)


def _always_training(case: Case) -> list[str]:
    norms = _norms(case)
    for norm in norms:
        mixin(norm, forward=_live_forward)
    return _paths(case, norms)


def _forgotten_buffers(case: Case) -> list[str]:
    norms = _norms(case)
    for norm in norms:
        norm.reset_running_stats()
    return _paths(case, norms)


def _other_data(case: Case) -> list[str]:
    norms = _norms(case)
    with torch.no_grad():
        for norm in norms:
            norm.running_var.mul_(9.0)
            norm.running_mean.add_(norm.running_var.sqrt())
    return _paths(case, norms)


def _tiny(case: Case) -> list[str]:
    sites = [s for s in case.batch_norms() if s.shape[0] * 4 <= 4 * s.shape[0] and len(s.shape) == 2]
    if not sites:
        raise Unfit("every channel has values in space beside the batch")
    case.evidence["loader"] = [(batch[0][:4],) for batch in case.evidence["loader"]]
    case.model.train()
    return [s.path for s in sites]


def _frozen(case: Case) -> list[str]:
    """The part of the model that holds the first batch norm is frozen, its statistics are not."""
    sites = [s for s in case.batch_norms() if "." in s.path and s.path.rpartition(".")[0]]
    parts = [s.path.rpartition(".")[0] for s in sites]
    parts = [p for p in parts if any(x.ndim > 1 for x in case.module(p).parameters())]
    if not parts:
        raise Unfit("no part of its own around a batch norm")
    part = parts[0]
    for parameter in case.module(part).parameters():
        parameter.requires_grad_(False)
    inside = [s.path for s in case.batch_norms() if s.path == part or s.path.startswith(f"{part}.")]
    if len(inside) == len(case.batch_norms()):
        raise Unfit("nothing but this part has a batch norm")
    return [*inside, part]


class _Waking:
    """A training step that begins with ``model.train()``."""

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        model.train()
        loss_of(model(*args, **kwargs)).backward()


def _woken(case: Case) -> list[str]:
    case.evidence["train_step"] = _Waking()
    return [s.path for s in case.batch_norms()]


def _recomputed(case: Case) -> list[str]:
    """A block with batch norms in activation checkpointing."""
    parents = [s.path.rpartition(".")[0] for s in case.batch_norms()]
    parents = [p for p in parents if p and not isinstance(case.module(p), nn.ModuleList | nn.Sequential)]
    if not parents:
        raise Unfit("no block of its own around a batch norm")
    parent = case.random.choice(parents)
    block = case.module(parent)
    base = type(block)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *a, **k: base.forward(self, *a, **k), *args, use_reentrant=False, **kwargs)

    mixin(block, forward=forward)
    return [s.path for s in case.batch_norms() if s.path.startswith(f"{parent}.")]


def _bad_variance(value: float) -> Any:
    def inject(case: Case) -> list[str]:
        norms = _norms(case)
        for norm in norms:
            norm.running_var[3] = value
        return _paths(case, norms)

    return inject


def _half_buffers(case: Case) -> list[str]:
    norms = [case.module(s.path) for s in case.batch_norms()]
    for norm in norms:
        norm.to(case.dtype)
    return _paths(case, norms)


def _stale(case: Case) -> list[str]:
    norms = [case.module(s.path) for s in case.batch_norms()]
    for norm in norms:
        norm.reset_running_stats()
    return _paths(case, norms)


def _other_momentum(case: Case) -> list[str]:
    norms = _norms(case)
    if any((norm.momentum or 0) > 0.5 for norm in norms):
        raise Unfit("the norm has such a momentum already")
    for norm in norms:
        norm.momentum = 0.9
    return _paths(case, norms)


def _singleton(case: Case) -> list[str]:
    sites = [s for s in case.batch_norms() if len(s.shape) == 2]
    if not sites:
        raise Unfit("one sample has many values a channel")
    data = case.evidence["loader"][0][0]
    case.evidence["loader"] = [(data,), (data[:1],)]
    case.model.train()
    return [s.path for s in sites]


def last_batch(case: Case) -> Observed:
    """Return how many samples each batch has, and the statistics that the last leaves."""
    return {f"batch {i}": torch.tensor(float(len(b[0]))) for i, b in enumerate(case.evidence["loader"])}


def _spike(case: Case) -> list[str]:
    """One batch a hundred times larger than the others."""
    data = case.evidence["loader"][0][0]
    if not data.is_floating_point() or not case.norms:
        raise Unfit("the inputs are token ids")
    case.evidence["loader"] = [(data,), (100 * data,)]
    return [case.norms[0].path]


def sizes(case: Case) -> Observed:
    """Return the root mean square of each batch."""
    return {f"batch {i}": b[0].float().square().mean().sqrt() for i, b in enumerate(case.evidence["loader"])}


def _unfinished(case: Case) -> list[str]:
    norms = _norms(case)
    if all((1 - norm.momentum) ** 3 < 0.01 for norm in norms):
        raise Unfit("three batches are enough for such a momentum")
    for norm in norms:
        norm.num_batches_tracked.fill_(3)
        start = (1 - norm.momentum) ** 3  # what is left of the initial values
        norm.running_mean.mul_(1 - start)
        norm.running_var.mul_(1 - start).add_(start)
    return _paths(case, norms)


def _fed(case: Case) -> list[tuple[Any, Any]]:
    """Return the pairs of a convolution or linear map and the batch norm that runs next."""
    order: list[nn.Module] = []
    hooks = [
        m.register_forward_hook(lambda module, *_: order.append(module))
        for m in case.model.modules()
        if isinstance(m, nn.Conv2d | nn.Linear | nn.modules.batchnorm._BatchNorm)
    ]
    with torch.no_grad():
        case.call()
    for hook in hooks:
        hook.remove()
    norm = nn.modules.batchnorm._BatchNorm
    return [(a, b) for a, b in itertools.pairwise(order) if not isinstance(a, norm) and isinstance(b, norm)]


def _biased(case: Case) -> list[str]:
    """A bias in the convolution or linear map before a batch norm."""
    names = {id(m): n for n, m in case.model.named_modules()}
    pairs = [(a, b) for a, b in _fed(case) if a.bias is None]
    if not pairs:
        raise Unfit("no map without a bias before a batch norm")
    before, norm = case.random.choice(pairs)
    before.bias = nn.Parameter(0.1 * torch.randn(norm.num_features, generator=torch.Generator().manual_seed(5)))
    return [names[id(before)], names[id(norm)]]


def parameters(case: Case) -> Observed:
    """Return the sizes of parameters: a bias that is taken out again is one more of them, with a gradient of 0."""
    return {"trained numbers": torch.tensor(float(sum(p.numel() for p in case.model.parameters())))}


def _shared(case: Case) -> list[str]:
    """One batch norm in the place of two, whose inputs differ sixfold in size: each norm alone would take that out."""
    names = {id(m): n for n, m in case.model.named_modules()}
    for (_, first), (before, second) in itertools.pairwise(_fed(case)):
        if first.num_features == second.num_features and first is not second:
            with torch.no_grad():
                before.weight.mul_(6.0)
            owner, _, name = names[id(second)].rpartition(".")
            setattr(case.module(owner), name, first)
            return [names[id(first)], names[id(second)]]
    raise Unfit("no two batch norms of one width in series")


def _not_loaded(case: Case) -> list[str]:
    """The checkpoint's statistics were dropped on the way."""
    norms = _norms(case)
    for norm in norms:
        norm.reset_running_stats()
    return _paths(case, norms)


def _spare_ranks(case: Case) -> list[str]:
    sites = [s for s in case.batch_norms() if len(s.shape) == 2]
    data = next(iter((*case.args, *case.kwargs.values())))
    if not sites:
        raise Unfit("one sample has many values a channel")
    case.evidence["config"] = {"world_size": 8}
    case.evidence["loader"] = [(data[:4],), (data[4:8],)]
    return [s.path for s in sites]


def world(case: Case) -> Observed:
    """Return the statistics that one process takes of its share of the batch."""
    twin = copy.deepcopy(case.model).train()
    with torch.no_grad():
        for batch in case.evidence.get("loader", [case.args]):
            twin(*batch)
    return {name: b.double() for name, b in twin.named_buffers()}


FAULTS = (
    Fault(
        name="evaluation-in-train-mode", codes=("BNS001",), inject=_no_eval, setting="batches", observe=evaluated,
        effects=("BNS002",), what=("eval_fn never calls model.eval()", "eval_fn 从不调用 model.eval()"),
    ),
    Fault(
        name="training-hard-coded", codes=("BNS002",), inject=_always_training,
        effects=("AXS001", "BNS003"),
        what=("F.batch_norm(..., training=True) with buffers", "带缓冲区的 F.batch_norm(..., training=True)"),
    ),
    Fault(
        name="statistics-never-updated", codes=("BNS003",), inject=_forgotten_buffers, setting="loaded",
        effects=("CKP005",),
        what=("trained gains over running statistics of the first moment", "增益已训练，运行统计量却是初始值"),
    ),
    Fault(
        name="statistics-of-other-data", codes=("BNS004",), inject=_other_data, setting="batches",
        what=("running statistics of other data", "运行统计量来自另外的数据"),
    ),
    Fault(
        name="four-values-a-channel", codes=("BNS006",), inject=_tiny, setting="batches", observe=last_batch,
        effects=("BNS001",), what=("training on batches of four", "以四个样本的批训练"),
    ),
    Fault(
        name="frozen-part-with-live-statistics", codes=("BNS007",), inject=_frozen, setting="training",
        what=("requires_grad=False without eval()", "requires_grad=False 但没有 eval()"),
    ),
    Fault(
        name="eval-undone-by-train", codes=("BNS008",), inject=_woken, setting="frozen",
        observe=buffers_after_a_step,
        what=("norms in eval mode, and a step that calls train()", "归一化在评估模式，训练步却调用 train()"),
    ),
    Fault(
        name="statistics-under-checkpointing", codes=("BNS009",), inject=_recomputed, setting="training",
        observe=buffers_after_a_step,
        what=("activation checkpointing around a batch norm", "批归一化外有激活检查点"),
    ),
    Fault(
        name="negative-variance", codes=("BNS011",), inject=_bad_variance(-1.0), setting="loaded",
        effects=("NUM009", "CKP005", "BNS003"), what=("a running variance of -1", "运行方差为 -1"),
    ),
    Fault(
        name="infinite-variance", codes=("BNS011",), inject=_bad_variance(float("inf")), setting="loaded",
        effects=("NUM009", "CKP005"), what=("an infinite running variance", "运行方差为无穷"),
    ),
    Fault(
        name="statistics-in-bfloat16", codes=("BNS012",), inject=_half_buffers, setting="training",
        dtype=torch.bfloat16, observe=buffers_after_a_step, effects=("NUM013", "PAR007"),
        what=("running statistics in bfloat16", "运行统计量为 bfloat16"),
    ),
    Fault(
        name="averaged-without-statistics", codes=("BNS013",), inject=_stale, setting="averaged",
        what=("an averaged model with the statistics of the first moment", "平均模型的统计量仍是初始值"),
    ),
    Fault(
        name="momentum-of-the-other-convention", codes=("BNS015",), inject=_other_momentum, setting="training",
        observe=buffers_after_a_step, what=("momentum 0.9 for 0.1", "动量写成 0.9，应为 0.1"),
    ),
    Fault(
        name="last-batch-of-one", codes=("BNS016",), inject=_singleton, setting="batches", observe=last_batch,
        effects=("BNS006", "BNS001", "BNS004"),
        what=("a loader whose last batch is one sample", "loader 的最后一批只有一个样本"),
    ),
    Fault(
        name="spike-in-the-data", codes=("DYN003",), inject=_spike, setting="batches", information=True,
        observe=sizes, effects=("BNS004",), what=("one batch a hundred times larger", "有一批数据大了一百倍"),
    ),
    Fault(
        name="three-batches-counted", codes=("BNS005",), inject=_unfinished, setting="loaded", information=True,
        effects=("CKP005", "BNS004"), what=("running statistics after three batches", "只统计了三批"),
    ),
    Fault(
        name="bias-before-batch-norm", codes=("BNS014",), inject=_biased, setting="training", information=True,
        observe=parameters, what=("a bias that the batch norm takes out again", "偏置随即被批归一化减去"),
    ),
    Fault(
        name="one-batch-norm-at-two-places", codes=("PAR008",), inject=_shared, setting="training",
        what=("one batch norm in the place of two", "一个批归一化用在两处"),
    ),
    Fault(
        name="statistics-not-loaded", codes=("CKP005", "BNS003"), inject=_not_loaded, setting="referenced",
        effects=("CKP006",), what=("running statistics lost on the way from the checkpoint", "加载时丢失运行统计量"),
    ),
    Fault(
        name="local-statistics-of-eight-processes", codes=("DST001",), inject=_spare_ranks, setting="training",
        observe=world, effects=("BNS006",),
        what=("plain batch norm, four samples a process", "每进程四个样本的普通批归一化"),
    ),
)  # fmt: skip
