"""All that a check might leave changed, taken before and compared after."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

__all__ = ["State", "assert_same", "state"]


@dataclass
class State:
    """All that a check might leave changed."""

    tensors: dict[str, Tensor]
    identities: dict[str, tuple[int, int]]
    versions: dict[str, int]
    modes: dict[str, bool]
    requires_grad: dict[str, bool]
    grads: dict[str, Tensor | None]
    hooks: dict[str, tuple[int, ...]]
    attributes: dict[str, list[str]]
    random: Any
    flags: dict[str, Any]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
# all of them: removing a global hook with kwargs leaves an entry in _global_forward_hooks_with_kwargs (torch 2.13)
GLOBAL_HOOKS = [name for name, value in vars(torch_module).items() if name.startswith("_global_") and value is not None]


def state(model: nn.Module) -> State:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parameters = dict(model.named_parameters())
    return State(
        tensors={name: t.detach().clone() for name, t in named.items()},
        identities={name: (id(t), t.data_ptr()) for name, t in named.items()},
        versions={name: t._version for name, t in named.items()},
        modes={path: m.training for path, m in model.named_modules()},
        requires_grad={name: p.requires_grad for name, p in parameters.items()},
        grads={name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()},
        hooks={path: tuple(len(getattr(m, h)) for h in HOOKS) for path, m in model.named_modules()},
        attributes={path: sorted(vars(m)) for path, m in model.named_modules()},
        random={
            "torch": hash(bytes(torch.get_rng_state().tolist())),
            "python": hash(random.getstate()),
            "numpy": hash(pickle.dumps(np.random.get_state())),
        },
        flags={
            "dtype": torch.get_default_dtype(),
            "fast path": torch.backends.mha.get_fastpath_enabled(),
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "anomaly": torch.is_anomaly_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "function modes": torch._C._len_torch_function_stack(),
            "default device": str(torch.get_default_device()),
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "math": torch.backends.cuda.math_sdp_enabled(),
            "mkldnn": torch.backends.mkldnn.enabled,
            "autocast": torch.is_autocast_enabled("cpu"),
            **{name: len(getattr(torch_module, name)) for name in GLOBAL_HOOKS},
        },
    )


def assert_same(before: State, after: State) -> None:
    for field in fields(State):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name in ("tensors", "grads"):
            assert old.keys() == new.keys()
            for name, tensor in old.items():
                same = new[name] is None if tensor is None else torch.equal(tensor, new[name])
                assert same, f"{field.name}: {name} changed"
        else:
            assert old == new, field.name
