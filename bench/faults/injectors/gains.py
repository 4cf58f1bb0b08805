"""Faults of gains: how they start, what the optimizer does to them, what was stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.faults.case import Case, Fault, Observed, Unfit
from bench.faults.settings import RATE, loss_of

__all__ = ["FAULTS"]


def _gain(case: Case, site: Any) -> nn.Parameter:
    return case.model.get_parameter(site.weight_path)


def decay_alone(case: Case) -> Observed:
    """Return the parameters after a step of the optimizer whose gradients are all 0: what moves is decay."""
    twin = case.copied()
    for parameter in twin.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in twin.evidence["optimizer"].param_groups:
        group["lr"] = RATE
    twin.evidence["optimizer"].step()
    return {name: p.detach().double() for name, p in twin.model.named_parameters()}


def one_step(case: Case) -> Observed:
    """Return the parameters after one training step of the optimizer at its full rate."""
    twin = case.copied()
    loss_of(twin.call()).backward()
    optimizer = twin.evidence["optimizer"]
    for group in optimizer.param_groups:
        group["lr"] = RATE
    optimizer.step()
    return {name: p.detach().double() for name, p in twin.model.named_parameters()}


def _decayed(case: Case) -> list[str]:
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=RATE, weight_decay=0.1)
    _replace_optimizer(case, optimizer)
    decayed = [s for s in case.vectors(shared=True) if s.spec and s.spec.weight_offset == 0]
    return [s.path for s in decayed] or _refuse("all gains are centred on 0")


def _refuse(why: str) -> list[str]:
    raise Unfit(why)


def _replace_optimizer(case: Case, optimizer: torch.optim.Optimizer) -> None:
    case.evidence["optimizer"] = optimizer
    case.evidence["scheduler"] = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=100)


def _by_name(case: Case) -> list[str]:
    """The usual filter of names: "bias" and "LayerNorm.weight" are spared, whatever else is a norm is not."""
    names = [n for n, _ in case.model.named_parameters()]
    spared = {n for n in names if "bias" in n or "LayerNorm.weight" in n}
    held = {s.weight_path: s.path for s in case.vectors() if s.spec and s.spec.weight_offset == 0}
    missed = [path for name, path in held.items() if name not in spared]
    if not missed:
        raise Unfit("the names tell all gains")
    named = dict(case.model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if n not in spared], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n in spared], "weight_decay": 0.0},
    ]
    _replace_optimizer(case, torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE))
    return missed


def _off_by_one(case: Case) -> list[str]:
    """Gains in the convention that the family's norms do not compute."""
    sites = case.vectors(shared=True)
    offset = sites[0].spec.weight_offset if sites[0].spec else 0.0
    if "config" not in case.evidence or offset not in (0.0, 1.0):
        raise Unfit("no family to compare with")
    sites = [s for s in sites if s.spec and s.spec.weight_offset == offset]
    with torch.no_grad():
        for site in sites:
            _gain(case, site).add_(1.0 if offset else -1.0)
    case.evidence["checkpoint"] = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    return [s.path for s in sites]


def _drawn(case: Case) -> list[str]:
    """The init function of the matrices reached the norms."""
    sites = case.some(case.vectors())
    sites = [s for s in sites if s.spec and s.spec.weight_offset == 0] or _none()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for site in sites:
            gain = _gain(case, site)
            gain.copy_(0.02 * torch.randn(gain.shape, generator=generator))
    return [s.path for s in sites]


def _none() -> list[Any]:
    raise Unfit("all gains are centred on 0")


def _blown(case: Case) -> list[str]:
    inside = [s for s in case.vectors() if s.layer is not None]
    if len({(s.stack, s.layer) for s in inside}) < 5 * len({s.stack for s in inside}) or not inside:
        raise Unfit("fewer than five norms of one role")
    site = case.random.choice(inside)
    with torch.no_grad():
        offset = site.spec.weight_offset if site.spec else 0.0
        gain = _gain(case, site)
        gain.copy_((gain + offset) * 60 - offset)
    return [site.path]


def _holes(case: Case) -> list[str]:
    sites = case.some(case.vectors())
    with torch.no_grad():
        for site in sites:
            gain = _gain(case, site)
            dead = case.random.sample(range(len(gain)), max(2, len(gain) // 16))
            gain[dead] = -(site.spec.weight_offset if site.spec else 0.0)
    return [s.path for s in sites]


def _half_gains(case: Case) -> list[str]:
    """Gains of exactly 1 in bfloat16, at a rate that cannot move them."""
    sites = case.vectors()
    sites = [s for s in sites if s.spec and s.spec.weight_offset == 0] or _none()
    with torch.no_grad():
        for site in sites:
            _gain(case, site).fill_(1.0)
    for group in case.evidence["optimizer"].param_groups:
        group["lr"] = 1e-4
    # and those of group norms and of norms at several places, which the rate holds as well
    held = dict(case.model.named_parameters())
    return [s.path for s in case.norms if s.weight_path in held and s.spec and s.spec.weight_offset == 0]


def moved(case: Case) -> Observed:
    """Return the share of each vector that a step of training moves."""
    twin = case.copied()
    before = {n: p.detach().clone() for n, p in twin.model.named_parameters() if p.ndim == 1}
    twin.evidence["train_step"](twin.model, *twin.args, **twin.kwargs)
    now = dict(twin.model.named_parameters())
    return {n: (now[n] != p).double().mean().detach() for n, p in before.items()}


def _untrained_gains(case: Case) -> list[str]:
    """Gains that no group of the optimizer holds, beside shifts that one does; it has stepped."""
    sites = [s for s in case.vectors() if s.spec and s.spec.weight_offset == 0] or _none()
    held = {s.weight_path for s in sites}
    with torch.no_grad():
        for site in sites:
            _gain(case, site).fill_(1.0)
    kept = [p for n, p in case.model.named_parameters() if n not in held]
    optimizer = torch.optim.AdamW([{"params": kept, "weight_decay": 0.0}], lr=RATE)
    _replace_optimizer(case, optimizer)
    loss_of(case.call()).backward()
    optimizer.step()
    case.model.zero_grad()
    return [s.path for s in sites]


def _doubled(case: Case) -> list[str]:
    sites = [s for s in case.vectors() if s.spec and s.spec.weight_offset == 1] or _refuse_offsets()
    with torch.no_grad():
        for site in sites:
            _gain(case, site).fill_(1.0)
    return [s.path for s in sites]


def _refuse_offsets() -> list[Any]:
    raise Unfit("no norm computes 1 + weight")


def _dead_final(case: Case) -> list[str]:
    from normwise.facts.records import Place

    sites = case.vectors(places=(Place.FINAL,))
    with torch.no_grad():
        for site in sites:
            _gain(case, site).fill_(-(site.spec.weight_offset if site.spec else 0.0))
    return [s.path for s in sites]


FAULTS = (
    Fault(
        name="decayed-gains", codes=("PAR001",), inject=_decayed, setting="training", observe=decay_alone,
        what=("weight decay on every parameter", "所有参数都有权重衰减"),
    ),
    Fault(
        name="decayed-by-name", codes=("PAR001",), inject=_by_name, setting="training", observe=decay_alone,
        what=("gains told by the name LayerNorm.weight", "按名称 LayerNorm.weight 区分增益"),
    ),
    Fault(
        name="offset-mistaken", codes=("PAR002",), inject=_off_by_one, setting="loaded",
        effects=("PAR010", "PAR003", "NUM005"), what=("gains of w in 1 + w, or the reverse", "w 与 1 + w 的增益互换"),
    ),
    Fault(
        name="drawn-gains", codes=("PAR003",), inject=_drawn, effects=("NUM005",),
        what=("gains drawn from N(0, 0.02)", "增益取自 N(0, 0.02)"),
    ),
    Fault(
        name="gain-blown-up", codes=("PAR004",), inject=_blown, setting="loaded", information=True,
        effects=("PLC010", "CKP003"), what=("a gain 60 times that of its siblings", "某增益是同类的 60 倍"),
    ),
    Fault(
        name="channels-of-zero", codes=("PAR005",), inject=_holes, setting="loaded",
        what=("a sixteenth of a gain is 0", "增益的十六分之一为 0"),
    ),
    Fault(
        name="updates-lost", codes=("PAR007",), inject=_half_gains, setting="stepping", dtype=torch.bfloat16,
        observe=moved, effects=("PAR009", "NUM013"),
        what=("gains of 1 in bfloat16 at a rate of 1e-4", "bfloat16 中为 1 的增益，学习率 1e-4"),
    ),
    Fault(
        name="gains-in-no-group", codes=("PAR009",), inject=_untrained_gains, setting="training", observe=one_step,
        what=("gains that the optimizer does not hold", "优化器不含增益"),
    ),
    Fault(
        name="gains-doubled", codes=("PAR010", "PAR002"), inject=_doubled,
        what=("ones in a norm that computes 1 + weight", "计算 1 + weight 的归一化存了 1"),
    ),
    Fault(
        name="final-norm-silent", codes=("PAR010",), inject=_dead_final, effects=("NUM005", "NUM009", "PAR003"),
        what=("a final norm whose gain is 0", "末端归一化的增益为 0"),
    ),
)  # fmt: skip
