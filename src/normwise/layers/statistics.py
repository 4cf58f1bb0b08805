"""Recalibration: running statistics of batch norms taken anew from data, exactly pooled."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normwise.functional.batch import per_channel
from normwise.functional.masks import as_mask
from normwise.kernels import Moments
from normwise.layers._batch_module import BatchModule
from normwise.layers._collectives import gather, ranks_of
from normwise.layers._pooling import ChannelMoments, batch_moments, nothing, pool
from normwise.layers.sync_batch_norm import SyncBatchNorm

__all__ = ["update_statistics"]

Norm = _BatchNorm | BatchModule


def update_statistics(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], object] | None = None,
    device: torch.device | str | None = None,
    process_group: distributed.ProcessGroup | None = None,
) -> None:
    """Replace the running statistics of every batch norm by those of all that ``loader`` yields.

    For averaged weights (SWA, EMA), after surgery or a change of data, or where running averages lag behind.
    Mean and unbiased variance are exactly those of all elements seen, pooled with their counts in float64:
    ``torch.optim.swa_utils.update_bn`` averages the variances of batches, which leaves out the spread between
    their means and gives a short last batch the weight of a full one. Covers the batch norms of torch.nn and of
    normwise, synchronized ones included; padding that normwise's are told about (``mask``, ``lengths``) does not
    count. Layers that the pass does not reach keep what they have, with a warning.

    During the pass batch norms normalize with the statistics of the batch, as in training, and everything else
    runs in the mode it is in: call ``model.eval()`` before for statistics without dropout, ``model.train()`` for
    what ``update_bn`` does. No gradients are kept. Modes and hooks are left as found, and if the pass fails so
    are the statistics. ``num_batches_tracked`` becomes the number of batches seen.

    With several processes, each passes its own part of the data: SyncBatchNorm ends with the statistics of all
    parts. It needs equally many batches on every process, of any size, empty ones included.

    Args:
        model: changed in place.
        loader: what ``model`` takes: a tensor; a mapping, passed as keywords; or a tuple or list that begins
            with its inputs, of which as many are passed as its ``forward`` requires, so (images, labels) does.
        forward: how to run a batch instead: ``lambda model, batch: model(batch["x"], mask=batch["real"])``.
        device: where to move tensors of a batch first.
        process_group: over which other batch norms are pooled as well, at the end of the pass; without it their
            statistics are those of the process.

    Raises:
        ValueError: no batch norm with running statistics, or a loader without a batch.

    Examples:
        >>> norm = nn.BatchNorm1d(1)
        >>> update_statistics(norm, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0], [9.0]])])
        >>> norm.running_mean, norm.running_var
        (tensor([5.]), tensor([10.]))
    """
    norms = {path: each for path, each in model.named_modules() if isinstance(each, (_BatchNorm, BatchModule))}
    seen = [_Seen(path, each) for path, each in norms.items() if each.running_mean is not None]
    if not seen:
        raise ValueError(
            f"update_statistics() found no batch norm with running statistics in {type(model).__name__}; "
            "there is nothing to recalibrate: leave the call out, or build the norms with track_running_stats=True"
        )
    batches = 0
    with torch.no_grad(), _observed(seen), _uncompiled():
        for batch in loader:
            moved = batch if device is None else _moved(batch, device)
            (forward or _call)(model, moved)
            batches += 1
    if not batches:
        raise ValueError(
            "update_statistics() was given a loader that yields no batch; "
            "pass a list or a DataLoader: an iterator that was used before is empty"
        )
    with torch.no_grad():
        for each in seen:
            each.write(process_group)
    _warn_of_unreached([each.path for each in seen if not each.calls])


def _warn_of_unreached(paths: list[str]) -> None:
    if paths:
        shown = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        warnings.warn(
            f"update_statistics() left {len(paths)} batch norms as they were, because the pass did not call them: "
            f"{shown}; pass forward= if the model is to be run in another way",
            stacklevel=3,
        )


class _Seen:
    """All that one layer was given, as the statistics of it."""

    def __init__(self, path: str, norm: Norm) -> None:
        self.path, self.norm, self.calls = path, norm, 0
        self.mean, self.var = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
        self.moments = nothing(norm.num_features, self.mean.device)

    def __call__(self, module: Norm, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        x = args[0] if args else kwargs["input"]
        channel_dim, mask = 1, None
        if isinstance(module, BatchModule):
            channel_dim = module.channel_dim
            mask = as_mask(x, kwargs.get("mask"), kwargs.get("lengths"), channel_dim, self.path)
        pair = zip(self.moments, batch_moments(x, mask, channel_dim), strict=True)
        self.moments = pool(ChannelMoments(*map(torch.stack, pair)))
        self.calls += 1

    def write(self, process_group: distributed.ProcessGroup | None) -> None:
        """Pool over processes, and put the result into the buffers."""
        norm, found = self.norm, self.moments
        if isinstance(norm, (nn.SyncBatchNorm, SyncBatchNorm)):
            found = _over_processes(found, norm.process_group)
        elif process_group is not None:
            found = _over_processes(found, process_group)
        mean, unbiased, elements = per_channel(Moments(*found))
        self.mean.copy_(torch.where(elements > 0, mean, self.mean))
        self.var.copy_(torch.where(elements > 1, unbiased, self.var))
        if norm.num_batches_tracked is not None and self.calls:
            norm.num_batches_tracked.fill_(self.calls)


def _over_processes(found: ChannelMoments, group: distributed.ProcessGroup | None) -> ChannelMoments:
    ranks = ranks_of(group, None, "update_statistics()")
    if ranks is None:
        return found
    rows = gather(torch.cat(found), ranks)
    return pool(ChannelMoments(*rows.unflatten(1, (3, -1)).unbind(1)))


@contextmanager
def _observed(seen: list[_Seen]) -> Iterator[None]:
    """Let the layers take statistics of batches and tell ``seen``; leave modes, hooks and buffers as they were."""
    with ExitStack() as undo:
        for each in seen:
            undo.callback(setattr, each.norm, "training", each.norm.training)
            for buffer in each.norm.buffers(recurse=False):
                undo.callback(buffer.copy_, buffer.clone())
            undo.callback(each.norm.register_forward_hook(each, with_kwargs=True).remove)
            each.norm.training = True
        yield


def _uncompiled() -> AbstractContextManager[object]:
    """Return a context in which compiled models run as written: compiled code does not call hooks added later."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _moved(batch: Any, device: torch.device | str) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    return [_moved(value, device) for value in batch] if isinstance(batch, (tuple, list)) else batch


def _call(model: nn.Module, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch[: max(1, _required(model))])
    return model(batch)


def _required(model: nn.Module) -> int:
    """Return how many positional arguments ``model`` cannot do without; of a wrapper, what it wraps."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    required = sum(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters)
    inside = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
    return _required(inside) if not required and isinstance(inside, nn.Module) else required
