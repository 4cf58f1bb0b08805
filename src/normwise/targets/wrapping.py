"""Wrappers that run a model unchanged: torch.compile, DataParallel, DDP, FSDP (``fully_shard`` wraps nothing).

PEFT and other wrappers that change what is computed are part of the model and stay.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["fully_sharded", "unwrap"]

# Recognised by the child they register, so that torch._dynamo and FSDP need not be imported.
_CHILD_OF_WRAPPER = {"OptimizedModule": "_orig_mod", "FullyShardedDataParallel": "_fsdp_wrapped_module"}
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def unwrap(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module inside all wrappers, and the prefix that turns its paths into the user's.

    Args:
        model: a module, wrapped or not.

    Returns:
        The inner module and the prefix, ``""`` or a dotted path that ends in a dot: the path ``norm`` of
        the inner module is ``prefix + "norm"`` in ``model.named_modules()``.

    Examples:
        >>> inner, prefix = unwrap(nn.DataParallel(nn.Linear(2, 2)))
        >>> inner, prefix
        (Linear(in_features=2, out_features=2, bias=True), 'module.')
    """
    prefix = ""
    while (child := _wrapped_child(model)) is not None:
        model, prefix = model.get_submodule(child), f"{prefix}{child}."
    return model, prefix


def fully_sharded(model: nn.Module) -> list[Any]:
    """Return the modules to which ``fully_shard`` was applied; ``reshard()`` gives up what a run of theirs gathered."""
    return [
        module
        for module in model.modules()
        if any(base.__name__ == "FSDPModule" and base.__module__.startswith("torch.") for base in type(module).__mro__)
    ]


def _wrapped_child(model: nn.Module) -> str | None:
    if isinstance(model, _PARALLEL):
        return "module"
    for base in type(model).__mro__:
        child = _CHILD_OF_WRAPPER.get(base.__name__)
        if child in model._modules and base.__module__.startswith("torch."):
            return child
    return None
