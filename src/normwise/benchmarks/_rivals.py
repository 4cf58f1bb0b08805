"""Who computes a norm: ours, torch's, its compilation, the class of transformers, ONNX Runtime; on a GPU others too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normwise.benchmarks import _gpu, _onnx
from normwise.benchmarks._contest import Built, Rival, Setting
from normwise.benchmarks._result import OURS
from normwise.kernels import eager
from normwise.spec import NormSpec

__all__ = ["COMPILED", "EAGER", "EPS", "TORCH", "TRANSFORMERS", "built", "rivals_of"]

EAGER, TORCH, COMPILED, TRANSFORMERS = "normwise eager", "torch.nn", "torch.compile", "transformers"
EPS = 1e-5


def rivals_of(
    setting: Setting,
    ours: Callable[[], nn.Module],
    spec: NormSpec,
    theirs: Callable[[], nn.Module],
    *,
    with_eager: bool,
    rms: bool = False,
) -> list[Rival]:
    """Return everyone who can compute a layer here, ours first.

    Args:
        setting: what it is about.
        ours: makes our layer, which takes a residual too where the setting has one.
        spec: what our layer computes.
        theirs: makes torch's layer, without a residual.
        with_eager: time our eager kernel too.
        rms: it is an RMSNorm over the last axis: transformers has it.
    """

    def plain() -> nn.Module:
        norm = _placed(theirs(), setting)
        return _AddThen(norm) if setting.residual else norm

    found = [Rival(name=OURS, build=lambda: built(_placed(ours(), setting)))]
    if with_eager:
        found.append(Rival(name=EAGER, build=lambda: _eager(_placed(ours(), setting), spec, setting)))
    found += [
        Rival(name=TORCH, build=lambda: built(plain())),
        Rival(name=COMPILED, build=lambda: _compiled(plain())),
    ]
    if rms:
        found.append(Rival(name=TRANSFORMERS, build=lambda: built(_of_transformers(setting))))
    if setting.device.startswith("cuda"):
        return found + _gpu.rivals_of(setting, rms=rms)
    if _onnx.installed():
        found.append(Rival(name=_onnx.NAME, build=lambda: Built(_onnx.session(theirs(), setting)), trains=False))
    return found


def built(module: nn.Module) -> Built:
    """Return a module as a rival."""
    return Built(module, tuple(module.parameters()))


class _AddThen(nn.Module):
    """The residual add before a norm that has none: what people write."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.norm(total), total


def _placed(module: nn.Module, setting: Setting) -> nn.Module:
    return module.to(setting.device, setting.dtype)


def _eager(layer: Any, spec: NormSpec, setting: Setting) -> Built:
    """Return our eager kernel with the parameters of our layer, without the checks of the layer."""
    weight, bias = layer.weight, layer.bias

    def plain(x: torch.Tensor) -> torch.Tensor:
        return eager.forward(spec, x, weight, bias)

    def added(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return plain(total), total

    return Built(added if setting.residual else plain, tuple(layer.parameters()))


def _compiled(module: nn.Module) -> Built:
    """Return what Inductor makes of a module, for these very shapes."""
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # or its graphs could not be kept for a second backward pass
    return Built(torch.compile(module, dynamic=False, fullgraph=True), tuple(module.parameters()))


def _of_transformers(setting: Setting) -> nn.Module:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = _placed(LlamaRMSNorm(setting.shape[-1], eps=EPS), setting)
    return _AddThen(norm) if setting.residual else norm
