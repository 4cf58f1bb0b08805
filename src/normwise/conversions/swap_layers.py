"""Put normwise layers in the place of a model's norms: the same function, reversible, under the same state-dict names.

## What it does
Norms of torch.nn, of transformers and hand-written ones are found by what they compute, not by what they are called:
a copy of every module that holds no more than a norm does is called with numbers of ours. Where a layer of normwise
computes the same on every layout, mode and dtype that the module takes, with the same gradients and running
statistics, it takes over the module's own tensors: gains, shifts and statistics stay the same objects, so optimizers,
ties, ``requires_grad`` and checkpoints stay. Tensors keep their names ("gamma"). Each change says on which dtypes
the layer is equal to the bit; elsewhere it is equal within rounding.

## What is refused
Norms that no layer equals, norms with hooks, parametrized, quantized or scripted ones, and norms that
are computed inside the forward of a larger module (named where inputs are given). ``restore(model)`` puts the old
modules back, with the weights of that moment; ``nw.accelerate(model)`` is this conversion in place, in one line.

## Options
- ``to``: put one kind of norm in the place of another. ``sync-batch-norm``, ``frozen-batch-norm`` and ``batch-norm``
  (back from those two) are the same function in evaluation. ``rms-norm`` (from LayerNorm), ``layer-norm`` (from
  RMSNorm) and ``group-norm`` (from BatchNorm) are another one, a start for fine-tuning: to get from LayerNorm to
  RMSNorm without a change of the function use the conversion ``rms-norm``.
- ``groups``: of ``to="group-norm"``.
- ``bias``: whether ``to="rms-norm"`` keeps the shift of the LayerNorm.

## Example
```python
print(nw.accelerate(model))
converted = nw.convert("swap-layers", model, to="sync-batch-norm")
```
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from normwise.conversions import _exchange
from normwise.conversions._edits import REPLACED, SwapNorm, replace_everywhere
from normwise.conversions._plan import Change, Plan, Refusal
from normwise.conversions._recognition.recogniser import Recognised, Recogniser
from normwise.errors import NoNorm, NotKnown, TraceError
from normwise.facts.facts import Facts
from normwise.facts.sites import Site
from normwise.layers._norm_module import NormModule
from normwise.targets.target import InputsFrom

__all__ = ["ZH", "plan", "plan_of_model", "restore"]

ZH = """把模型的归一化层换成 normwise 的层：函数不变，可以还原，state dict 的名字不变。

## 做什么
torch.nn、transformers 和手写的归一化层都按其计算内容识别，不看类名：凡是所含张量不多于归一化层的模块，都用我们
给定的数值调用它的一个副本。若 normwise 的某一层在该模块接受的每种布局、模式和 dtype 上计算相同，梯度和运行统计量
也相同，它就接管该模块自己的张量：增益、偏移和统计量仍是同一批对象，因此优化器、权重绑定、``requires_grad`` 和检查
点都不变。张量保留原名（如 "gamma"）。每一项改动都说明在哪些 dtype 上逐位相等；其余情形在舍入误差内相等。

## 何时拒绝
没有任何层与之相等的归一化、带 hook 的、参数化的、量化的或 TorchScript 的模块，以及在更大模块的
forward 内部计算的归一化（给出输入时会列出）。``restore(model)`` 把原模块放回，并带上当时的权重；
``nw.accelerate(model)`` 用一行代码就地完成这一转换。

## 选项
- ``to``：把一种归一化换成另一种。``sync-batch-norm``、``frozen-batch-norm`` 和 ``batch-norm``（从前两者换回）在评估
  模式下函数相同。``rms-norm``（来自 LayerNorm）、``layer-norm``（来自 RMSNorm）和 ``group-norm``（来自 BatchNorm）
  是另一个函数，只作为微调的起点：要在不改变函数的前提下从 LayerNorm 换成 RMSNorm，请用转换 ``rms-norm``。
- ``groups``：``to="group-norm"`` 的组数。
- ``bias``：``to="rms-norm"`` 是否保留 LayerNorm 的偏移。

## 示例
```python
print(nw.accelerate(model))
converted = nw.convert("swap-layers", model, to="sync-batch-norm")
```
"""


def plan(facts: Facts, *, to: str | None = None, groups: int = 32, bias: bool = True) -> Plan:
    """Return the plan of the swap.

    Args:
        facts: of the model; inputs are not needed, with them norms that are no modules are named.
        to: the kind of norm to put in the place of another; None: our layer of the same function.
        groups: of ``to="group-norm"``.
        bias: whether ``to="rms-norm"`` keeps the shift of the LayerNorm.

    Raises:
        ValueError: no such kind, or groups below 1.
    """
    _exchange.check(to, groups)
    notes: list[str] = []
    sites: tuple[Site, ...] = ()
    if facts.target.inputs_from is not InputsFrom.NONE:
        try:
            sites = facts.sites
        except (NotKnown, TraceError) as why:
            notes.append(f"norms that are no modules of their own were not looked for: {why}")
    return plan_of_model(facts.target.model, sites, to=to, groups=groups, bias=bias, notes=tuple(notes))


def plan_of_model(
    model: nn.Module,
    sites: tuple[Site, ...] = (),
    *,
    to: str | None = None,
    groups: int = 32,
    bias: bool = True,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Return the plan for a model.

    Args:
        model: is not changed; its weights need no storage.
        sites: of the norm map, where it was made.
        to: as in ``plan``.
        groups: as in ``plan``.
        bias: as in ``plan``.
        notes: what the user should know.
    """
    recognise = Recogniser(mixed=to is None)  # an exchange does not keep the dtypes of mixed calls
    shapes = {site.row.path: site.row.shape for site in sites}
    edits, changes, refused = [], [], []
    no_norms: dict[str, str] = {}
    for path, module in _modules(model):
        if to is None and isinstance(module, NormModule):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            refused.append(Refusal(path=path, why="it is compiled by TorchScript", unblock="convert it before that"))
            continue
        try:
            found = recognise(module, shapes.get(path, ()))
            if not path:
                raise NotKnown("the model itself is the norm: there is no module to put another one in")
            edit, how = (
                _swapped(path, module, found)
                if to is None
                else _exchange.exchanged(path, module, found, to=to, groups=groups, bias=bias)
            )
        except NoNorm as why:
            no_norms[path] = why.why
        except _exchange.NotOfThisKind:
            continue
        except NotKnown as why:
            refused.append(Refusal(path=path, why=why.why))
        else:
            edits.append(edit)
            changes.append(Change(path=path, what=f"{type(module).__name__} -> normwise {edit.layer}", how=how))
    if to is None:
        refused += _not_modules(model, sites, {*(c.path for c in changes), *(r.path for r in refused)}, no_norms)
    return Plan(
        conversion="swap-layers",
        options={"to": to, "groups": groups, "bias": bias},
        edits=tuple(edits),
        recipes=tuple(_exchange.count(key) for edit in edits for key in edit.created),
        changes=tuple(changes),
        refused=tuple(refused),
        exact=_exchange.is_exact(to),
        notes=(*notes, *_exchange.notes(to, bool(edits))),
    )


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, without what a scripted module holds."""
    scripted: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{parent}." if parent else "") for parent in scripted):
            continue
        if isinstance(module, torch.jit.ScriptModule):
            scripted.append(path)
        yield path, module


def _swapped(path: str, module: nn.Module, found: Recognised) -> tuple[SwapNorm, str]:
    if "process_group" in vars(module):
        raise NotKnown("it shares statistics between processes; to='sync-batch-norm' puts ours in its place")
    return found.swap(path, reversible=True), found.how


def _not_modules(
    model: nn.Module, sites: tuple[Site, ...], told: set[str], no_norms: dict[str, str]
) -> Iterator[Refusal]:
    """Yield the norms of the map that no module alone computes, or one that was not understood."""
    for path in dict.fromkeys(site.row.path.split("#")[0] for site in sites):
        site = next(site.row for site in sites if site.row.path.split("#")[0] == path)
        module = model.get_submodule(path)
        if path in told or isinstance(module, NormModule):
            continue
        alone = not module._modules and path in no_norms
        why = no_norms[path] if alone else "computed inside the forward of this module, not by a module of its own"
        yield Refusal(path=path, why=why, source=site.source)


def restore(model: nn.Module) -> tuple[str, ...]:
    """Put back the modules whose places ``swap-layers`` took, with the weights of now; in place.

    Args:
        model: one to which the conversion was applied.

    Returns:
        The paths of the modules that were put back; none where nothing was swapped.
    """
    layers = {path: module for path, module in model.named_modules() if REPLACED in vars(module)}
    for layer in layers.values():
        old: nn.Module = vars(layer)[REPLACED]
        for name in (*old._parameters, *old._buffers):
            held = old._parameters if name in old._parameters else old._buffers
            if held[name] is not None:
                held[name] = layer._parameters.get(name, layer._buffers.get(name))  # type: ignore[assignment]
        old._modules.update(layer._modules)
        replace_everywhere(model, layer, old)
    return tuple(layers)
