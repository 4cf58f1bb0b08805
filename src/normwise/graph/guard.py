"""Leaves a model and the process exactly as they were found, also after an exception or Ctrl-C."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd import grad_mode

from normwise.graph import contents
from normwise.graph.process import Process

__all__ = ["as_found", "tensor_state", "uncounted"]

_DICTS = contents.DICTS


@contextmanager
def as_found(
    model: nn.Module, *, evaluate: bool | None = True, inputs: Any = (), process: bool = True
) -> Iterator[None]:
    """Run a block with the model in eval mode and undo everything the block changed.

    Restored: modes, attributes of every module, parameters' and buffers' identity, ``.grad``,
    ``requires_grad``, and of the process what ``process`` lists: random number generators, default
    dtype and device, flags of torch, global hooks.
    Values that are overwritten in place are restored by the tracer, which sees the writes; here
    buffers are compared and copied back, and so are their counts of writes: a backward that the user has pending
    would refuse a buffer that seems to have changed.

    Args:
        model: the module to protect.
        evaluate: put it in eval mode (True), in train mode (False), or leave it (None).
        inputs: arguments of the model's calls, whose lists and dicts are protected as well.
        process: the state of the process, too; False where a guard around this one sees to it.
    """
    modules = list(model.modules())
    modes = [m.training for m in modules]
    attributes = [_snapshot(m) for m in modules]
    held = contents.Contents(modules, inputs)
    owned, kept = _tensors_of(modules, "_parameters"), _tensors_of(modules, "_buffers")
    buffers = [(b, _version(b), uncounted(b), b.detach().clone()) for b in _plain_tensors(kept)]
    grads = [(p, p.grad if p.is_leaf else None, p.requires_grad) for p in owned]
    gradients = (g for _, g, _ in grads if g is not None)
    tensors = _plain_tensors(chain(owned, kept, gradients))
    contained = [(t, t.detach()) for t in tensors if t.layout is torch.strided and not t.is_quantized]
    around = Process() if process else None
    try:
        if evaluate is not None:
            with contextlib.suppress(NotImplementedError):  # an exported program has one mode
                model.train(not evaluate)
        yield
    finally:
        for module, saved in zip(modules, attributes, strict=True):
            _restore(module, saved)
        held.restore()
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for tensor, content in contained:
            if _swapped(tensor, content):
                tensor.data = content
        for buffer, version, count_kept, copy in buffers:
            # torch's batch_norm writes its running statistics without counting the write
            if version is None or buffer._version != version or not _equal(buffer, copy):
                with count_kept, torch.no_grad(), torch.inference_mode(buffer.is_inference()):
                    buffer.copy_(copy)
        for parameter, grad, requires in grads:
            if parameter.is_leaf and parameter.grad is not grad:
                parameter.grad = grad
            if parameter.requires_grad != requires:
                parameter.requires_grad_(requires)
        if around is not None:
            around.restore()


def tensor_state(model: nn.Module) -> dict[str, int]:
    """Return a hash of the bits of every parameter and buffer, by path (for "model unchanged")."""
    state = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.device.type == "meta":
            continue
        if tensor.layout is not torch.strided or tensor.is_nested:
            continue  # no one block of bits
        plain = tensor.detach().int_repr() if tensor.is_quantized else tensor.detach().resolve_conj().resolve_neg()
        flat = plain.cpu().contiguous().view(-1)
        state[name] = hash(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return state


def _swapped(tensor: torch.Tensor, content: torch.Tensor) -> bool:
    """Whether ``tensor.data = other`` gave a parameter or buffer another content since it was detached."""
    alike = all(getattr(tensor, n) == getattr(content, n) for n in ("dtype", "device", "layout", "is_quantized"))
    return not alike or not tensor.is_set_to(content)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # inference tensors count no writes


def uncounted(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context that ends with as many writes counted as now."""
    if tensor.is_inference():
        return contextlib.nullcontext()
    return grad_mode._unsafe_preserve_version_counter(tensor)


def _equal(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True  # no norm keeps its statistics in one
    return tensor.shape == copy.shape and torch.equal(tensor, copy)


def _tensors_of(modules: Iterable[nn.Module], kind: str) -> list[torch.Tensor]:
    """Return what ``parameters()`` and ``buffers()`` do, of modules that were listed before."""
    return list({id(t): t for m in modules for t in getattr(m, kind).values() if t is not None}.values())


def _plain_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors with storage; fake and meta ones have no values to protect."""
    for tensor in tensors:
        if tensor.device.type != "meta" and type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer):
            yield tensor


def _snapshot(module: nn.Module) -> dict[str, Any]:
    saved = dict(module.__dict__)
    for name in _DICTS:
        if isinstance(saved.get(name), dict):
            saved[name] = (saved[name], dict(saved[name]))
        else:
            saved.pop(name, None)  # a ScriptModule keeps these in C++
    return saved


def _restore(module: nn.Module, saved: dict[str, Any]) -> None:
    current = module.__dict__
    for name in [n for n in current if n not in saved and n not in _DICTS]:
        del current[name]
    for name, value in saved.items():
        if name in _DICTS:
            mapping, items = value
            if list(mapping.items()) != list(items.items()) if name.endswith("hooks") else _differs(mapping, items):
                mapping.clear()
                mapping.update(items)
            current[name] = mapping
        elif current.get(name, saved) is not value:
            current[name] = value


def _differs(mapping: dict[str, Any], items: dict[str, Any]) -> bool:
    return list(mapping) != list(items) or any(mapping[k] is not items[k] for k in items)
