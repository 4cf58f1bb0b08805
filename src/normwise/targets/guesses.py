"""Guesses at the inputs of a model from the modules it holds and the signature of its forward.

The first module that reads a known kind of data decides: an embedding wants ids, a convolution images of
its channels, a linear layer its features. A guess is only a candidate; ``inputs.infer`` runs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["BATCH", "Maker", "candidates", "channels_first", "sequence_first", "time_steps"]

BATCH = 2
_TIMES = (12, 13, 11, 14, 17, 19)
_ENTRIES = 4  # modules that are tried as the one that reads the input
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_CONV_SIZES = {1: (32, 224, 4000), 2: (32, 64, 224), 3: (8, 16, 32)}  # 4000: raw audio


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Makes example tensors on the device and in the dtype of a model, from a generator of its own."""

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype
    time: int

    @classmethod
    def of(cls, model: nn.Module) -> Maker:
        """Return the maker for a model; its values are the same every time."""
        tensors = [*model.parameters(), *model.buffers()]
        floats = [tensor.dtype for tensor in tensors if tensor.dtype in _FLOATS]
        return cls(
            generator=torch.Generator().manual_seed(0),
            device=tensors[0].device if tensors else torch.device("cpu"),
            dtype=floats[0] if floats else torch.float32,
            time=time_steps(model),
        )

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return standard normal values."""
        values = torch.randn(shape, generator=self.generator)
        return values.to(device=self.device, dtype=dtype or self.dtype)

    def ids(self, *shape: int, below: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        """Return integers from 0 to ``below`` - 1."""
        return torch.randint(max(below, 1), shape, generator=self.generator).to(device=self.device, dtype=dtype)

    def full(self, shape: tuple[int, ...], value: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a constant, such as the mask that hides nothing."""
        return torch.full(shape, value, dtype=dtype, device=self.device)


def time_steps(model: nn.Module) -> int:
    """Return a number of time steps that is no size of the model's own, so that a time axis can be told."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    return next((time for time in _TIMES if time not in sizes), _TIMES[0])


def candidates(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield positional arguments that the model may take, the likeliest first."""
    names = _wanted_arguments(model)
    if not names:
        yield ()
        return
    maker = Maker.of(model)
    for first in _first_arguments(model, names[0], maker):
        yield (first, *(_further(name, first, maker) for name in names[1:]))


def sequence_first(model: nn.Module) -> bool:
    """Tell whether the first module that reads data takes [T, B, H]."""
    entry = _first_entry(model)
    return isinstance(entry, nn.RNNBase | nn.MultiheadAttention) and not entry.batch_first


def channels_first(model: nn.Module) -> bool:
    """Tell whether the first module that reads data takes [B, C, T]."""
    return isinstance(_first_entry(model), nn.Conv1d | nn.ConvTranspose1d)


def _first_entry(model: nn.Module) -> nn.Module | None:
    return next((module for module in model.modules() if _reader(module) is not _reads_nothing), None)


def _first_arguments(model: nn.Module, name: str, maker: Maker) -> Iterator[torch.Tensor]:
    for entry in _entries(model, name):
        yield from _reader(entry)(entry, maker)
    for parameter in model.parameters():  # a module written by hand, by the last axis of its first parameter
        if parameter.ndim:
            yield maker.floats(BATCH, maker.time, parameter.shape[-1])
            yield maker.floats(BATCH, parameter.shape[-1])
        return


def _wanted_arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments that forward needs, or its first where all have defaults."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(inspect.signature(model.forward).parameters.values())
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
    return needed or [p.name for p in parameters[:1]]


def _further(name: str, first: torch.Tensor, maker: Maker) -> torch.Tensor:
    """Return a second or later argument, by its name; one like the first where the name says nothing."""
    name = name.lower()
    if "mask" in name:
        return maker.full(tuple(first.shape[:2]), 1, torch.bool)
    if "length" in name or "lens" in name:
        return maker.full((BATCH,), first.shape[1] if first.ndim > 1 else 1, torch.long)
    if name in ("t", "step", "steps", "timestep", "timesteps", "sigma"):
        return torch.arange(1, BATCH + 1, device=maker.device)
    return first.clone()


def _entries(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules that may read the input, in the order they are defined; a telling name goes first."""
    found: dict[tuple[Any, ...], nn.Module] = {}
    for module in model.modules():
        if _reader(module) is not _reads_nothing:
            found.setdefault((type(module), *(tuple(p.shape) for p in module.parameters(recurse=False))), module)
    entries = list(found.values())
    if any(part in name.lower() for part in ("ids", "idx", "token")):
        entries.sort(key=lambda module: not isinstance(module, nn.Embedding))
    elif any(part in name.lower() for part in ("image", "img", "pixel")):
        entries.sort(key=lambda module: not isinstance(module, nn.Conv2d))
    yield from entries[:_ENTRIES]


def _reads_nothing(module: Any, maker: Maker) -> Iterator[torch.Tensor]:
    del module, maker
    return iter(())


def _reads_ids(module: Any, maker: Maker) -> Iterator[torch.Tensor]:
    yield maker.ids(BATCH, maker.time, below=module.num_embeddings)
    yield maker.ids(BATCH, below=module.num_embeddings)


def _reads_maps(module: Any, maker: Maker) -> Iterator[torch.Tensor]:
    ndim = len(module.kernel_size)
    for size in _CONV_SIZES[ndim]:
        yield maker.floats(BATCH, module.in_channels, *[size] * ndim)


def _reads_features(module: Any, maker: Maker) -> Iterator[torch.Tensor]:
    yield maker.floats(BATCH, maker.time, module.in_features)
    yield maker.floats(BATCH, module.in_features)


def _reads_sequences(module: Any, maker: Maker) -> Iterator[torch.Tensor]:
    size = module.embed_dim if isinstance(module, nn.MultiheadAttention) else module.input_size
    shape = (BATCH, maker.time) if module.batch_first else (maker.time, BATCH)
    yield maker.floats(*shape, size)


def _reads_steps(module: Any, maker: Maker) -> Iterator[torch.Tensor]:
    yield maker.floats(BATCH, module.input_size)


def _reads_trailing(module: Any, maker: Maker) -> Iterator[torch.Tensor]:
    yield maker.floats(BATCH, maker.time, *module.normalized_shape)


def _reads_channels(module: Any, maker: Maker) -> Iterator[torch.Tensor]:
    channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    for spatial in ((), (maker.time,), (32, 32), (8, 8, 8)):
        yield maker.floats(BATCH, channels, *spatial)


_Reader = Callable[[Any, Maker], Iterator[torch.Tensor]]
_READERS: tuple[tuple[tuple[type[nn.Module], ...], _Reader], ...] = (
    ((nn.Embedding, nn.EmbeddingBag), _reads_ids),
    ((nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _reads_maps),
    ((nn.Linear,), _reads_features),
    ((nn.RNNBase, nn.MultiheadAttention), _reads_sequences),
    ((nn.RNNCellBase,), _reads_steps),
    ((nn.LayerNorm, nn.RMSNorm), _reads_trailing),
    ((nn.GroupNorm, nn.modules.batchnorm._NormBase), _reads_channels),
)


def _reader(module: nn.Module) -> _Reader:
    return next((reader for kinds, reader in _READERS if isinstance(module, kinds)), _reads_nothing)
