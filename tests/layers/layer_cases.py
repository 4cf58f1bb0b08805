"""One case a layer, and one for each of its options: how to build it, what to feed it, what it must return.

Every input has the batch on its first axis, so that any batch size can be asked for. A formula reads the parameters
of the module it is given: give it a float64 copy, and it is the truth for a half-precision module as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from normwise import layers
from normwise.spec import Gate, NormSpec, Scope, Statistic, Weight, reference

__all__ = ["BY_LAYER", "CASES", "LAYERS", "Case", "Tensors", "cubes", "outputs", "randomized", "truth"]

Tensors = tuple[torch.Tensor, ...]
LAYERS = {name for name in layers.__all__ if isinstance(getattr(layers, name), type)}
FEATURES, CHANNELS, CONDITION = 6, 4, 3


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(batch: int) -> Tensors:
    return (randn(batch, 4, FEATURES, seed=1) * 1.5 + 0.5,)


def two_tokens(batch: int) -> Tensors:
    return tokens(batch)[0], randn(batch, 4, FEATURES, seed=2)


def streams(batch: int) -> Tensors:
    """Quarters: their sums need no rounding in any dtype."""
    x, residual = two_tokens(batch)
    return (x * 4).round() / 4, (residual * 4).round() / 4


def three_tokens(batch: int) -> Tensors:
    return *two_tokens(batch), randn(batch, 4, FEATURES, seed=3)


def conditioned(batch: int) -> Tensors:
    return tokens(batch)[0], randn(batch, CONDITION, seed=2)


def rows(batch: int) -> Tensors:
    return (randn(batch, CHANNELS, seed=1) * 1.5 + 0.5,)


def sequences(batch: int) -> Tensors:
    return (randn(batch, CHANNELS, 5, seed=1) * 1.5 + 0.5,)


def images(batch: int) -> Tensors:
    return (randn(batch, CHANNELS, 3, 2, seed=1) * 1.5 + 0.5,)


def volumes(batch: int) -> Tensors:
    return (randn(batch, CHANNELS, 2, 3, 2, seed=1) * 1.5 + 0.5,)


def heads(batch: int) -> Tensors:
    return randn(batch, 3, 4, FEATURES, seed=1) + 0.5, randn(batch, 3, 2, FEATURES, seed=2)


# -- what is real -----------------------------------------------------------------------------


def lengths(batch: int) -> dict[str, torch.Tensor]:
    return {"lengths": torch.arange(batch) % 4 + 2}


def mask_of(shape: tuple[int, ...], batch: int) -> dict[str, torch.Tensor]:
    """Return a mask with about a third of padding and at least two real positions a sample."""
    mask = torch.rand(batch, *shape, generator=torch.Generator().manual_seed(4)) > 0.3
    mask.view(batch, -1)[:, :2] = True
    return {"mask": mask}


def real(x: torch.Tensor, channel: int, operands: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the operands ``mask`` or ``lengths`` as a mask shaped like ``x``."""
    if "mask" in operands:
        return operands["mask"].unsqueeze(channel).expand_as(x)
    if "lengths" in operands:
        return (torch.arange(x.shape[-1]) < operands["lengths"].view(-1, 1, 1)).expand_as(x)
    return None


# -- formulas ---------------------------------------------------------------------------------


def by_spec(module: Any, x: torch.Tensor, **operands: torch.Tensor) -> torch.Tensor:
    return reference(module.spec, x, module.weight, getattr(module, "bias", None), **operands)


def gated(module: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return by_spec(module, x, gate=gate)


def modulated(module: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return by_spec(module, x, scale=scale, shift=shift)


def added(module: Any, x: torch.Tensor, residual: torch.Tensor) -> Tensors:
    return by_spec(module, x + residual), x + residual


def projected(module: Any, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    active = condition * torch.sigmoid(condition)
    both = active @ module.linear.weight.T + module.linear.bias
    scale, shift = both[:, None, :FEATURES], both[:, None, FEATURES:]
    return by_spec(module, x, scale=scale, shift=shift)


def over_channels(module: Any, x: torch.Tensor) -> torch.Tensor:
    spec = replace(module.spec, axes=(module.channel_dim % x.ndim - x.ndim,))
    return reference(spec, x, module.weight, module.bias)


def of_groups(module: Any, x: torch.Tensor, **operands: torch.Tensor) -> torch.Tensor:
    spec = replace(module.spec, axes=tuple(range(1 - x.ndim, 0)))
    return reference(spec, x, module.weight, module.bias, real(x, 1, operands))


def of_instances(module: Any, x: torch.Tensor, **operands: torch.Tensor) -> torch.Tensor:
    return _kept_or_measured(module, x, 1, tuple(range(2 - x.ndim, 0)), operands)


def of_batches(module: Any, x: torch.Tensor, **operands: torch.Tensor) -> torch.Tensor:
    channel = module.channel_dim % x.ndim
    axes = tuple(axis - x.ndim for axis in range(x.ndim) if axis != channel)
    return _kept_or_measured(module, x, channel, axes, operands)


def _kept_or_measured(
    module: Any, x: torch.Tensor, channel: int, axes: tuple[int, ...], operands: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    mean = statistic = None
    if not module.training and module.running_mean is not None:
        shape = [-1 if axis == channel else 1 for axis in range(x.ndim)]
        mean, statistic = module.running_mean.view(shape), module.running_var.view(shape)
    mask = real(x, channel, operands)
    spec = replace(module.spec, axes=axes)
    return reference(spec, x, module.weight, module.bias, mask, mean=mean, statistic=statistic)


def frozen(module: Any, x: torch.Tensor) -> torch.Tensor:
    shape = (1, -1, 1, 1)
    mean, var, weight, bias = (
        each.view(shape) for each in (module.running_mean, module.running_var, module.weight, module.bias)
    )
    return (x - mean) / (var + module.eps).sqrt() * weight + bias


def tanh(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.weight * torch.tanh(module.alpha * x) + module.bias


def erf(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.weight * torch.erf(module.alpha * x + module.shift) + module.bias


def length(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x / x.square().sum(module.dim, keepdim=True).sqrt().clamp_min(module.eps)


def per_head(module: Any, q: torch.Tensor, k: torch.Tensor) -> Tensors:
    return by_spec(module.q_norm, q), by_spec(module.k_norm, k)


def over_heads(module: Any, q: torch.Tensor, k: torch.Tensor) -> Tensors:
    flat = by_spec(module.q_norm, q.flatten(-2)), by_spec(module.k_norm, k.flatten(-2))
    return flat[0].view_as(q), flat[1].view_as(k)


# -- cases ------------------------------------------------------------------------------------


def no_operands(batch: int) -> dict[str, torch.Tensor]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer with some options, inputs for it and its formula.

    Attributes:
        layer: its class.
        build: makes it, on the ``device`` and in the ``dtype`` given.
        inputs: float64 tensors for a batch of some size.
        formula: the output, from the parameters of a module and the inputs.
        operands: what is passed by keyword and has no gradient: masks and lengths.
        twin: makes torch's module of the same options.
        two_modes: whether train and eval differ.
        half_roundings: roundings of the output to the dtype of the input, each of half a unit in the last place.
        inner_roundings: such roundings of what the output is made from, relative to the largest value.
    """

    layer: type[nn.Module]
    build: Callable[..., nn.Module]
    inputs: Callable[[int], Tensors]
    formula: Callable[..., torch.Tensor | Tensors]
    operands: Callable[[int], dict[str, torch.Tensor]] = no_operands
    twin: Callable[..., nn.Module] | None = None
    two_modes: bool = False
    half_roundings: int = 1
    inner_roundings: int = 0

    @property
    def takes_dtype(self) -> bool:
        """Whether the layer has anything to put on a device: L2Norm has not."""
        return self.layer is not layers.L2Norm

    def make(self, dtype: torch.dtype = torch.float64, device: str | None = None) -> nn.Module:
        """Build the layer."""
        return self.build(device=device, dtype=dtype) if self.takes_dtype else self.build()


def case(
    layer: type[nn.Module],
    *arguments: Any,
    inputs: Callable[[int], Tensors],
    formula: Callable[..., torch.Tensor | Tensors],
    twin: type[nn.Module] | None = None,
    operands: Callable[[int], dict[str, torch.Tensor]] = no_operands,
    two_modes: bool = False,
    half_roundings: int = 1,
    inner_roundings: int = 0,
    **options: Any,
) -> Case:
    return Case(
        layer=layer,
        build=partial(layer, *arguments, **options),
        inputs=inputs,
        formula=formula,
        operands=operands,
        twin=None if twin is None else partial(twin, *arguments, **options),
        two_modes=two_modes,
        half_roundings=half_roundings,
        inner_roundings=inner_roundings,
    )


# silu and Linear round to the dtype of the condition
projecting = partial(case, inputs=conditioned, formula=projected, inner_roundings=4)
hidden = partial(case, inputs=tokens, formula=by_spec)
batched = partial(case, formula=of_batches, two_modes=True)
instances = partial(case, formula=of_instances)

OUTSIDE = NormSpec(
    center=True, statistic=Statistic.VARIANCE, eps=1e-3, eps_inside=False, biased=False, bias=True
)  # Annotated Transformer
OVER_TIME = NormSpec(scope=Scope.OTHER, axes=(-2,), center=True, statistic=Statistic.VARIANCE, weight=Weight.NONE)
GATED_OUTSIDE = NormSpec(gate=Gate.BEFORE, gate_activation="sigmoid", eps_inside=False, weight_offset=1.0)


def over_time(module: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return reference(module.spec, x, mask=mask)


def time_mask(batch: int) -> dict[str, torch.Tensor]:
    return {"mask": mask_of((4,), batch)["mask"].unsqueeze(-1)}


CASES: dict[str, Case] = {
    "AdaLayerNorm": projecting(layers.AdaLayerNorm, FEATURES, CONDITION),
    "AdaRMSNorm": projecting(layers.AdaRMSNorm, FEATURES, CONDITION),
    "AddLayerNorm": case(layers.AddLayerNorm, FEATURES, inputs=streams, formula=added),
    "AddRMSNorm": case(layers.AddRMSNorm, FEATURES, inputs=streams, formula=added),
    "BatchNorm": batched(layers.BatchNorm, FEATURES, channel_dim=-1, inputs=tokens),
    "BatchNorm1d": batched(layers.BatchNorm1d, CHANNELS, inputs=rows, twin=nn.BatchNorm1d),
    "BatchNorm1d lengths": batched(layers.BatchNorm1d, CHANNELS, inputs=sequences, operands=lengths),
    "BatchNorm1d no affine, momentum None": batched(
        layers.BatchNorm1d, CHANNELS, affine=False, momentum=None, inputs=sequences, twin=nn.BatchNorm1d
    ),
    "BatchNorm2d": batched(layers.BatchNorm2d, CHANNELS, inputs=images, twin=nn.BatchNorm2d),
    "BatchNorm2d mask": batched(
        layers.BatchNorm2d, CHANNELS, bias=False, inputs=images, operands=partial(mask_of, (3, 2))
    ),
    "BatchNorm2d untracked": batched(
        layers.BatchNorm2d, CHANNELS, track_running_stats=False, inputs=images, twin=nn.BatchNorm2d
    ),
    "BatchNorm3d": batched(layers.BatchNorm3d, CHANNELS, inputs=volumes, twin=nn.BatchNorm3d),
    "CenteredRMSNorm": hidden(layers.CenteredRMSNorm, FEATURES),
    "CenteredRMSNorm gain": hidden(layers.CenteredRMSNorm, FEATURES, elementwise_affine=True),
    "ChannelLayerNorm": case(layers.ChannelLayerNorm, CHANNELS, inputs=images, formula=over_channels),
    "ChannelRMSNorm": case(layers.ChannelRMSNorm, CHANNELS, inputs=images, formula=over_channels),
    "Derf": case(layers.Derf, FEATURES, inputs=tokens, formula=erf),
    "DynamicTanh": case(layers.DynamicTanh, FEATURES, inputs=tokens, formula=tanh),
    "FrozenBatchNorm": case(layers.FrozenBatchNorm, CHANNELS, inputs=images, formula=frozen),
    "GatedRMSNorm": case(layers.GatedRMSNorm, FEATURES, inputs=two_tokens, formula=gated),
    "GatedRMSNorm gate first, groups": case(
        layers.GatedRMSNorm, FEATURES, norm_before_gate=False, groups=2, inputs=two_tokens, formula=gated
    ),
    "GatedRMSNorm another convention": case(
        layers.GatedRMSNorm, FEATURES, spec=GATED_OUTSIDE, inputs=two_tokens, formula=gated
    ),
    "GroupNorm": case(layers.GroupNorm, 2, CHANNELS, inputs=images, formula=of_groups, twin=nn.GroupNorm),
    "GroupNorm lengths": case(
        layers.GroupNorm, 2, CHANNELS, bias=False, inputs=sequences, formula=of_groups, operands=lengths
    ),
    "GroupNorm mask": case(
        layers.GroupNorm, 1, CHANNELS, inputs=images, formula=of_groups, operands=partial(mask_of, (3, 2))
    ),
    "InstanceNorm1d": instances(layers.InstanceNorm1d, CHANNELS, inputs=sequences, twin=nn.InstanceNorm1d),
    "InstanceNorm1d lengths": instances(
        layers.InstanceNorm1d,
        CHANNELS,
        affine=True,
        track_running_stats=True,
        inputs=sequences,
        operands=lengths,
        two_modes=True,
    ),
    "InstanceNorm2d": instances(
        layers.InstanceNorm2d,
        CHANNELS,
        affine=True,
        track_running_stats=True,
        inputs=images,
        twin=nn.InstanceNorm2d,
        two_modes=True,
    ),
    "InstanceNorm2d mask": instances(
        layers.InstanceNorm2d, CHANNELS, affine=True, inputs=images, operands=partial(mask_of, (3, 2))
    ),
    "InstanceNorm3d": instances(layers.InstanceNorm3d, CHANNELS, affine=True, inputs=volumes, twin=nn.InstanceNorm3d),
    "L2Norm": case(layers.L2Norm, inputs=tokens, formula=length),
    "LayerNorm": hidden(layers.LayerNorm, FEATURES, twin=nn.LayerNorm),
    "LayerNorm two axes, no bias": hidden(layers.LayerNorm, (4, FEATURES), bias=False, twin=nn.LayerNorm),
    "LayerNorm eps outside, unbiased": hidden(layers.LayerNorm, FEATURES, spec=OUTSIDE),
    "LayerNorm cohere": hidden(layers.LayerNorm, FEATURES, spec=layers.FAMILIES["cohere"]),
    "ModulatedLayerNorm": case(layers.ModulatedLayerNorm, FEATURES, inputs=three_tokens, formula=modulated),
    "ModulatedLayerNorm gain": case(
        layers.ModulatedLayerNorm, FEATURES, elementwise_affine=True, inputs=three_tokens, formula=modulated
    ),
    "ModulatedRMSNorm": case(layers.ModulatedRMSNorm, FEATURES, inputs=three_tokens, formula=modulated),
    "Norm": case(layers.Norm, OVER_TIME, 1, inputs=tokens, formula=over_time, operands=time_mask),
    "Norm eps outside, unbiased": case(layers.Norm, OUTSIDE, FEATURES, inputs=tokens, formula=by_spec),
    "PartialRMSNorm": hidden(layers.PartialRMSNorm, FEATURES, 0.5),
    "QKNorm": case(layers.QKNorm, FEATURES, inputs=heads, formula=per_head),
    "QKNorm all heads": case(layers.QKNorm, FEATURES, 4, 2, over="all_heads", inputs=heads, formula=over_heads),
    "RMSNorm": hidden(layers.RMSNorm, FEATURES, twin=nn.RMSNorm),
    "RMSNorm unit offset": hidden(layers.RMSNorm, FEATURES, add_unit_offset=True),
    "RMSNorm shift": hidden(layers.RMSNorm, FEATURES, bias=True),
    "RMSNorm llama": hidden(layers.RMSNorm, FEATURES, spec=layers.FAMILIES["llama"], half_roundings=2),
    "ScaleNorm": hidden(layers.ScaleNorm, FEATURES),
    # without a process group; with one: test_sync_batch_norm
    "SyncBatchNorm": batched(layers.SyncBatchNorm, CHANNELS, inputs=images, twin=nn.SyncBatchNorm),
}
BY_LAYER = {name: CASES[name] for name in CASES if name == CASES[name].layer.__name__}


def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fill parameters and running statistics with numbers that no formula could take for their neutral values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + 0.8)
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point():
                low = -0.5 if name.endswith(("mean", "bias")) else 0.5
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + low)
    return module


def outputs(result: torch.Tensor | Tensors) -> Tensors:
    """Return one tensor or several as several."""
    return result if isinstance(result, tuple) else (result,)


def cubes(result: torch.Tensor | Tensors) -> torch.Tensor:
    """Return a loss whose gradient is 0 for no layer: sums and sums of squares of many outputs are constant."""
    return torch.stack([y.pow(3).sum() for y in outputs(result)]).sum()


def truth(case: Case, module: nn.Module, inputs: Tensors, operands: Mapping[str, torch.Tensor]) -> Tensors:
    """Return what the module should return, in float64 all the way."""
    wide = deepcopy(module).double()
    return outputs(case.formula(wide, *(each.double() for each in inputs), **operands))
