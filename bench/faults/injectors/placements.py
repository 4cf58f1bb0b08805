"""Faults of placement: norms that are missing, moved, doubled, never called; factors on the wrong side."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from bench.faults.case import Case, Fault, Observed, Unfit, mixin, swap
from bench.faults.settings import RATE, optimizer_of
from normwise.blocks.residual import Residual
from normwise.facts.records import NormSite, Place

__all__ = ["FAULTS", "last_sublayer"]


def _pre_blocks(case: Case) -> list[list[NormSite]]:
    """Return the pre-norms of each block of the largest stack whose sublayers read a norm.

    Raises:
        Unfit: there are fewer than four.
    """
    for index, stack in enumerate(case.placement.stacks):
        if str(stack.kind) not in ("pre", "parallel", "parallel_shared"):
            continue
        held: dict[int, list[NormSite]] = {}
        for site in case.vectors():
            if site.stack == index and site.layer is not None and site.placement is Place.PRE:
                held.setdefault(site.layer, []).append(site)
        if len(held) >= 4:
            return [held[layer] for layer in sorted(held)]
    raise Unfit("no pre-norm stack of four blocks")


def _no_final(case: Case) -> list[str]:
    _pre_blocks(case)
    finals = case.vectors(places=(Place.FINAL,))
    site = finals[-1]
    swap(case, site.path, nn.Identity())
    return [site.path, *last_sublayer(case, site)]


def last_sublayer(case: Case, site: NormSite) -> list[str]:
    """Return the last sublayer of the stack that a norm closes."""
    members = case.placement.stacks[site.stack or 0].members
    return [members[-1].path] if members else []


def _without(case: Case) -> list[str]:
    """One block between others has lost its norms."""
    blocks = _pre_blocks(case)
    sites = case.random.choice(blocks[1:-1])
    for site in sites:
        swap(case, site.path, nn.Identity())
    return _with_blocks(case, [s.path for s in sites])


def _with_blocks(case: Case, paths: list[str]) -> list[str]:
    """Return the paths and the sublayers that held them: rules on placement name those."""
    sublayers = [m.path for s in case.placement.stacks for m in s.members if set(m.norms) & set(paths)]
    blocks = {p.rpartition(".")[0] for p in paths if p.rpartition(".")[0]}
    return list(dict.fromkeys([*paths, *sublayers, *blocks]))


def _added_post(case: Case) -> list[str]:
    """One block between others normalizes what it returns."""
    blocks = _pre_blocks(case)
    sites = case.random.choice(blocks[1:-1])
    path = _block_of(case, sites)
    block = case.module(path)
    block.added_norm = copy.deepcopy(case.module(sites[0].path))
    base = type(block)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = base.forward(self, *args, **kwargs)
        return (self.added_norm(output[0]), *output[1:]) if isinstance(output, tuple) else self.added_norm(output)

    mixin(block, forward=forward)
    return [path, f"{path}.added_norm"]


def _block_of(case: Case, sites: list[NormSite]) -> str:
    """Return the module that holds all of a block's pre-norms.

    Raises:
        Unfit: it is the model itself, or a list.
    """
    parts = [s.path.split(".")[:-1] for s in sites]
    shared = [p[0] for p in zip(*parts, strict=False) if len(set(p)) == 1]
    path = ".".join(shared)
    if not path or isinstance(case.module(path), nn.ModuleList | nn.Sequential | nn.ModuleDict):
        raise Unfit("no module of its own for a block")
    return path


def _skip_from_normed(case: Case) -> list[str]:
    """In one block the first norm stands on the stream: skip and branch read its output."""
    blocks = _pre_blocks(case)
    sites = case.random.choice(blocks[1:])
    path = _block_of(case, sites[:1]) if len(sites) == 1 else _block_of(case, sites)
    block, first = case.module(path), sites[0]
    block.moved_norm = case.module(first.path)
    swap(case, first.path, nn.Identity())
    base = type(block)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return base.forward(self, self.moved_norm(args[0]), *args[1:], **kwargs)
        name = next(iter(kwargs))
        return base.forward(self, **{**kwargs, name: self.moved_norm(kwargs[name])})

    mixin(block, forward=forward)
    return _with_blocks(case, [path, f"{path}.moved_norm", first.path])


def _doubled(case: Case) -> list[str]:
    (site,) = case.some(case.vectors(places=(Place.PRE, Place.FINAL)), one=True)
    old = case.module(site.path)
    swap(case, site.path, nn.Sequential(old, copy.deepcopy(old)))
    return [site.path, f"{site.path}.0", f"{site.path}.1"]


def _never_called(case: Case) -> list[str]:
    """Every block holds its second norm and does not call it."""
    blocks = _pre_blocks(case)
    if min(map(len, blocks)) < 2:
        raise Unfit("blocks of one norm")
    paths = []
    for sites in blocks:
        owner, _, name = sites[1].path.rpartition(".")
        held = case.module(sites[1].path)
        swap(case, sites[1].path, nn.Identity())
        case.module(owner).add_module(f"{name}_2", held)
        paths.append(f"{owner}.{name}_2")
    return _with_blocks(case, paths)


def _linear(case: Case, member: Any) -> list[tuple[str, nn.Linear]]:
    width = case.placement.stacks[0].width
    return [
        (name, m)
        for name, m in case.model.named_modules()
        if name.startswith(f"{member.path}.") and isinstance(m, nn.Linear) and m.out_features == width
    ]


def _loud_writer(case: Case) -> list[str]:
    stacks = case.placement.stacks
    if not stacks or str(stacks[0].kind) not in ("pre", "parallel", "parallel_shared"):
        raise Unfit("no pre-norm stack")
    members = stacks[0].members
    for member in members[len(members) // 2 :]:
        written = [(n, m) for n, m in _linear(case, member) if m.in_features != m.out_features]
        if written:
            with torch.no_grad():
                written[-1][1].weight.normal_(0, 20.0, generator=torch.Generator().manual_seed(7))
            return [written[-1][0], member.path]
    raise Unfit("no linear map that writes into the stream")


def _attention(case: Case) -> list[tuple[str, nn.Module, list[str]]]:
    """Return the self-attentions whose queries and keys are linear maps of their own."""
    found = []
    for path, module in case.model.named_modules():
        maps = dict(module.named_children())
        names = [n for n in maps if n in ("q_proj", "k_proj", "query", "key", "q_lin", "k_lin")]
        if len(names) == 2 and all(isinstance(maps[n], nn.Linear) for n in names):
            found.append((path, module, names))
    if len(found) < 3:
        raise Unfit("no attentions with maps for queries and keys of their own")
    return found


def _saturated(case: Case) -> list[str]:
    if case.placement.qk_norm:
        raise Unfit("queries and keys are normalized")
    path, module, names = case.random.choice(_attention(case))
    with torch.no_grad():
        for name in names:
            weight = module.get_parameter(f"{name}.weight")
            weight.normal_(0, 1.0, generator=torch.Generator().manual_seed(8 + len(name)))
    return [path, *(f"{path}.{n}" for n in names), path.rpartition(".")[0]]


def _scaled_wrongly(case: Case) -> list[str]:
    if not case.placement.qk_norm:
        raise Unfit("queries and keys are not normalized")
    found = [(n, m) for n, m in case.model.named_modules() for a in ("scaling", "scale") if hasattr(m, a)]
    found = [(n, m) for n, m in found if any(s.path.startswith(f"{n}.") for s in case.norms if s.placement is Place.QK)]
    if not found:
        raise Unfit("no attention that holds its scale")
    for _, module in found:
        for name in ("scaling", "scale"):
            if hasattr(module, name):
                setattr(module, name, 10 * getattr(module, name))
    return [p for n, _ in found for p in (n, f"{n}.q_norm", f"{n}.k_norm")]


def _deep_norm(case: Case) -> nn.Module:
    if case.name != "decoder:deep-norm":
        raise Unfit("no DeepNorm")
    return case.model


def _alpha_lost(case: Case) -> list[str]:
    """DeepNorm's initial gain without its constant on the skip."""
    _deep_norm(case)
    return _factors(case, lambda skip, branch: (1.0, branch))


def _alpha_on_the_branch(case: Case) -> list[str]:
    """DeepNorm's constant on the branch."""
    _deep_norm(case)
    return _factors(case, lambda skip, branch: (branch, skip))


def _factors(case: Case, change: Any) -> list[str]:
    """Change the wiring of every residual sublayer of normwise's own stack."""
    found = [(path, module) for path, module in case.model.named_modules() if isinstance(module, Residual)]
    for _, module in found:
        skip, branch = change(module.wiring.skip_scale, module.wiring.branch_scale)
        module.wiring = dataclasses.replace(module.wiring, skip_scale=skip, branch_scale=branch)
    return [path for path, _ in found]


class _Constant:
    """A schedule that starts at its peak."""

    def __call__(self, step: int) -> float:
        """Return the share of the rate."""
        return 1.0


def _deep_post(case: Case) -> list[str]:
    """A deep post-norm stack that starts at its full rate."""
    stack = case.placement.stacks[0] if case.placement.stacks else None
    if stack is None or str(stack.kind) != "post" or stack.sublayers < 24:
        raise Unfit("no post-norm stack of 24 sublayers")
    optimizer = optimizer_of(case.model)
    case.evidence["optimizer"] = optimizer
    case.evidence["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, _Constant())
    return [m.path for m in stack.members]


def _idle(case: Case) -> list[str]:
    stacks = [s for s in case.placement.stacks if str(s.kind) in ("pre", "parallel", "parallel_shared")]
    if not stacks or stacks[0].sublayers < 6:
        raise Unfit("no pre-norm stack of six sublayers")
    members = stacks[0].members[-4 if stacks[0].sublayers > stacks[0].depth else -2 :]
    paths = []
    for member in members:
        inside = [m for n, m in case.model.named_modules() if n.startswith(f"{member.path}.") and _is_map(m)]
        with torch.no_grad():
            for module in inside:
                for parameter in module.parameters(recurse=False):
                    parameter.mul_(1e-3)
        paths.append(member.path)
    return paths


def _is_map(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def schedule(case: Case) -> Observed:
    """Return the rate that the first steps are made at."""
    return {"rate": torch.tensor(float(case.evidence["optimizer"].param_groups[0]["lr"]) / RATE)}


FAULTS = (
    Fault(
        name="final-norm-missing", codes=("PLC001",), inject=_no_final,
        what=("a pre-norm stack whose end is not normalized", "前置归一化的堆叠末端没有归一化"),
    ),
    Fault(
        name="block-without-norms", codes=("PLC002",), inject=_without, effects=("PLC007",),
        what=("one block has lost its norms", "一个块丢了归一化"),
    ),
    Fault(
        name="block-with-one-norm-more", codes=("PLC002",), inject=_added_post,
        what=("one block normalizes what it returns", "有一个块对自己的输出又做了一次归一化"), effects=("PLC003",),
    ),
    Fault(
        name="skip-from-normed", codes=("PLC003", "PLC002"), inject=_skip_from_normed,
        what=("skip and branch read the norm's output", "跳连与分支都读归一化的输出"),
    ),
    Fault(
        name="norm-of-a-norm", codes=("PLC004",), inject=_doubled, information=True, setting="loaded",
        what=("a norm directly behind another", "归一化之后紧接归一化"),
    ),
    Fault(
        name="norms-never-called", codes=("PAR006",), inject=_never_called,
        what=("every block holds a norm that it does not call", "每个块都有不调用的归一化"),
    ),
    Fault(
        name="loud-writer", codes=("PLC007",), inject=_loud_writer, information=True, effects=("PLC010",),
        what=("a matrix that writes a jump into the stream", "一个矩阵使残差流骤增"),
    ),
    Fault(
        name="idle-blocks", codes=("PLC008",), inject=_idle, information=True, setting="loaded", effects=("NUM005",),
        what=("last blocks that write next to nothing", "末尾的块几乎不写入"),
    ),
    Fault(
        name="logits-saturated", codes=("PLC010",), inject=_saturated, setting="loaded",
        what=("queries and keys have grown", "查询与键过大"),
    ),
    Fault(
        name="qk-norm-without-scale", codes=("PLC009",), inject=_scaled_wrongly, information=True,
        what=("normalized queries and keys, a scale ten times too large", "查询与键已归一化，缩放却大了十倍"),
    ),
    Fault(
        name="alpha-lost", codes=("PLC006",), inject=_alpha_lost,
        what=("DeepNorm's initial gain without its alpha", "有 DeepNorm 的初始增益而没有 alpha"),
    ),
    Fault(
        name="alpha-on-the-branch", codes=("PLC011",), inject=_alpha_on_the_branch, effects=("PLC006",),
        what=("DeepNorm's alpha on the branch", "DeepNorm 的 alpha 在分支上"),
    ),
    Fault(
        name="deep-post-norm-at-full-rate", codes=("PLC005",), inject=_deep_post, setting="fresh",
        observe=schedule, what=("a deep post-norm stack without warm-up", "深层后置归一化且没有预热"),
    ),
)  # fmt: skip
