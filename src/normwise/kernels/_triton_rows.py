"""The row family in Triton: the functions that ``triton.py`` registers for CUDA, and the shapes of their programs.

How many programs run and what each of them adds up is a function of shape alone, never of the GPU at hand, and
nothing is added atomically: the same call returns the same bits every time, and a row's result does not depend on
the other rows. Incoming gradients are only read. Importing this module needs triton.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from normwise.kernels import _triton_kernels as programs
from normwise.kernels._ops import Code, before_rows
from normwise.kernels.triton import refusal_of_code

__all__ = ["add_norm_rows", "norm_rows", "norm_rows_backward", "norm_rows_saving"]

_CENTERED = (int(Code.LAYER), int(Code.TORCH_LAYER))
_TRITON = {torch.float32: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # float32 rounds nothing


class Budget(NamedTuple):
    """How much a program may hold so that nothing spills; bench/triton_registers.md has what it takes."""

    widest: int  # columns of a row that is held whole; wider ones are swept
    per_thread: int  # elements of a tile
    warps: int  # at most: 32 leave 64 registers a thread, 16 leave 128


FORWARD = Budget(16384, 16, 32)
BACKWARD = Budget(8192, 8, 16)
SWEEP = 8192  # columns at a time
LEAST_WARPS = 4  # narrow rows share a program


class Shape(NamedTuple):
    """What one program works on: ``tile`` rows times ``block`` columns, with ``warps`` warps."""

    tile: int
    block: int
    warps: int


MERGE = Shape(32, 64, 4)


def shape_of(size: int, budget: Budget) -> Shape:
    """Return the shape of programs that hold whole rows, or sweep those that are too wide."""
    block = triton.next_power_of_2(size)
    if block > budget.widest:
        block = SWEEP
    a_warp = 32 * budget.per_thread
    tile = max(1, LEAST_WARPS * a_warp // block)
    return Shape(tile, block, min(tile * block // a_warp, budget.warps))


def norm_rows(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
) -> torch.Tensor:
    """Return y, shaped like ``x``: see ``_ops.py``."""
    return _forward(x, None, weight, bias, size, code, eps, offset, saving=False)[0]


def norm_rows_saving(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the statistics that the backward pass needs."""
    y, _, stats = _forward(x, None, weight, bias, size, code, eps, offset, saving=True)
    return y, stats


def add_norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
    wide: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, x + residual in the wider dtype of the two (float32 if ``wide``), and the statistics."""
    dtype = torch.float32 if wide else torch.promote_types(x.dtype, residual.dtype)
    return _forward(x, residual, weight, bias, size, code, eps, offset, saving=True, of_sum=dtype)


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
    *,
    saving: bool,
    of_sum: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normalized = of_sum or x.dtype
    _check(code, size, x, (residual,), (weight, bias))
    out = x.dtype
    if weight is not None and code & Code.PROMOTE and not of_sum:
        out = torch.promote_types(x.dtype, weight.dtype)
    y = x.new_empty(x.shape, dtype=out)
    total = x.new_empty(x.shape if of_sum else 0, dtype=normalized)
    rows = x.numel() // size
    kinds = 2 if Code.kind(code) in _CENTERED else 1
    stats = x.new_empty((kinds, *before_rows(x, size)), dtype=torch.float32) if saving else None
    if x.numel():
        x, residual = _by_row(x, size), None if residual is None else _by_row(residual, size)
        shape = shape_of(size, FORWARD)
        swept = size > shape.block
        _launch(
            programs.forward_wide if swept else programs.forward_tile,
            (triton.cdiv(rows, shape.tile),),
            shape,
            x,
            residual,
            _flat(weight),
            _flat(bias),
            y,
            total if of_sum else None,
            stats,
            rows,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            size,
            eps,
            offset,
            CENTER=Code.kind(code) in _CENTERED,
            LARGE=any(each is not None and each.dtype is not torch.float16 for each in (x, residual)),
            ROUND=_TRITON[normalized] if code & Code.ROUND_BEFORE_WEIGHT else None,
            ROUND_OFFSET=bool(code & Code.OFFSET_IN_WEIGHT_DTYPE),
        )
    return y, total, x.new_empty(0) if stats is None else stats


def norm_rows_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    stats: torch.Tensor,
    weight: torch.Tensor | None,
    size: int,
    code: int,
    eps: float,
    offset: float,
    needs: int,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, weight and bias, where ``needs`` (1 x, 2 weight, 4 bias) asks for them.

    Those of weight and bias are summed over rows in float32 and have the dtype of the weight (float32 without one).
    """
    _check(code, size, x, (dy, dsum), (weight,))
    of_weight = torch.float32 if weight is None else weight.dtype
    dx = x.new_empty(x.shape) if needs & 1 else None
    dweight, dbias = (x.new_empty(size, dtype=of_weight) if needs & bit else None for bit in (2, 4))
    if x.numel() == 0:
        for each in (dweight, dbias):
            if each is not None:
                each.zero_()
        return dx, dweight, dbias
    meaning: dict[str, Any] = {
        "CENTER": Code.kind(code) in _CENTERED,
        "ROUND_OFFSET": bool(code & Code.OFFSET_IN_WEIGHT_DTYPE),
    }
    rows = x.numel() // size
    x, dy, dsum = _by_row(x, size), _by_row(dy, size), None if dsum is None else _by_row(dsum, size)
    strides = dy.stride(0), 0 if dsum is None else dsum.stride(0), x.stride(0)
    given = dy, dsum, x, stats.contiguous(), _flat(weight)
    shape = shape_of(size, BACKWARD)
    swept = size > shape.block
    if needs & 1 and swept:
        _launch(programs.backward_wide, (rows,), shape, *given, dx, rows, *strides, size, offset, **meaning)
        needs -= 1
    if needs:
        if not needs & 1:  # any block of columns will do
            shape = shape_of(min(size, 1024), BACKWARD)
        tiles, parts = _division(rows, size, shape, summing=bool(needs & 6))
        partial = [dy.new_empty(parts, size, dtype=torch.float32) if needs & bit else None for bit in (2, 4)]
        _launch(
            programs.backward_tile,
            (parts, triton.cdiv(size, shape.block)),
            shape,
            *given,
            dx if needs & 1 else None,  # or it is written
            *partial,
            rows,
            *strides,
            size,
            offset,
            tiles,
            **meaning,
            ROUND=_TRITON[x.dtype] if code & Code.ROUND_BEFORE_WEIGHT else None,
        )
        for sums, out in zip(partial, (dweight, dbias), strict=True):
            if sums is not None and out is not None:
                _launch(programs.merge, (triton.cdiv(size, MERGE.block),), MERGE, sums, out, parts, size)
    return dx, dweight, dbias


def _check(
    code: int,
    size: int,
    x: torch.Tensor,
    like_x: tuple[torch.Tensor | None, ...],
    parameters: tuple[torch.Tensor | None, ...],
) -> None:
    """Raise ValueError where the programs would compute something else, or read what is not there.

    For callers of the operators: ``refusal`` looks at the calls that come through ``kernels``.
    """
    if why := refusal_of_code(code, x.dtype):
        raise ValueError(f"the CUDA kernel does not take this norm: {why}; use the eager one")
    if size < 1 or x.numel() % size:
        raise ValueError(f"an input of shape {tuple(x.shape)} has no rows of {size} elements")
    for each in (x, *like_x, *parameters):
        if each is None:
            continue
        if each.dtype not in _TRITON:
            raise ValueError(f"the CUDA kernel takes float16, bfloat16 and float32, not {each.dtype}")
        if each.device != x.device:
            raise ValueError(f"tensors are on {x.device} and {each.device}; move them to one device")
    for each in like_x:
        if each is not None and each.shape != x.shape:
            raise ValueError(f"a tensor of shape {tuple(each.shape)} does not go with an input of {tuple(x.shape)}")
    for each in parameters:
        if each is not None and each.numel() != size:
            raise ValueError(f"a parameter of shape {tuple(each.shape)} does not go with rows of {size} elements")


def _division(rows: int, size: int, shape: Shape, summing: bool) -> tuple[int, int]:
    """Return how many tiles a program of the backward pass takes, and how many programs there are.

    Without gradients of weight or bias each tile is a program. With them every program writes a row of float32
    partial sums: 8 tiles a program at least, so that those are few beside the input, and about as many programs as
    the largest GPUs hold at once (132 SMs x 64 warps on an H100), so that none of them is idle.
    """
    tiles = triton.cdiv(rows, shape.tile)
    if not summing:
        return 1, tiles
    most = max(16, 4096 // shape.warps // triton.cdiv(size, shape.block))
    each = triton.cdiv(tiles, min(most, triton.cdiv(tiles, 8)))
    return each, triton.cdiv(tiles, each)


def _launch(program: Any, grid: tuple[int, ...], shape: Shape, *args: Any, **constants: Any) -> None:
    """Run ``program`` on the GPU that holds its first argument."""
    if "TILE" in program.arg_names:
        constants["TILE"] = shape.tile
    with torch.cuda.device(args[0].device) if args[0].is_cuda else nullcontext():
        program[grid](*args, **constants, BLOCK=shape.block, num_warps=shape.warps, enable_fp_fusion=True)


def _by_row(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``x`` as [rows, size] with adjacent columns: a view wherever its strides allow one."""
    rows = x.reshape(-1, size)
    return rows if rows.stride(1) == 1 or size == 1 else rows.contiguous()


def _flat(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.reshape(-1).contiguous()
