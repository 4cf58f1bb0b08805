"""What the tests of norms of groups and of channels share: layouts, gradients, thread counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from normwise import kernels
from normwise.spec import NormSpec

__all__ = ["DTYPES", "Results", "as_eager", "bits", "laid", "poisoned", "results", "threads"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Results = dict[str, torch.Tensor]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return ``x`` [N, C, *] in another place or order of memory, the same numbers."""
    if layout == "last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "offset":  # from an address that is no multiple of a vector
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    return x


def results(
    kernel: str,
    spec: NormSpec,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    upstream: torch.Tensor,
) -> Results:
    """Return the output and the gradients of all inputs."""
    given = {"x": x, "weight": weight, "bias": bias}
    leaves = {name: each.detach().requires_grad_() for name, each in given.items() if each is not None}
    y = kernels.forward(spec, leaves["x"], leaves.get("weight"), leaves.get("bias"), kernel=kernel)
    grads = torch.autograd.grad(y, list(leaves.values()), upstream.to(y.dtype))
    return {"y": y.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}}


def as_eager(
    spec: NormSpec, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, upstream: torch.Tensor
) -> tuple[Results, Results, Results]:
    """Return the results of compiled code, of eager, and those of float64."""
    wide = (None if each is None else each.double() for each in (x, weight, bias))
    return (
        results("cpu", spec, x, weight, bias, upstream),
        results("eager", spec, x, weight, bias, upstream),
        results("eager", spec, *wide, upstream.double()),  # type: ignore[arg-type]
    )


def bits(found: Results) -> list[torch.Tensor]:
    """Return results as integers, so that equal means equal to the last bit, NaN included."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [each.contiguous().view(whole[each.element_size()]) for each in found.values()]


def poisoned(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> None:
    """Leave memory full of NaN behind for the allocator to hand out again."""
    kept = [torch.full(tuple(shape), torch.nan, dtype=dtype) for _ in range(8)]
    del kept
