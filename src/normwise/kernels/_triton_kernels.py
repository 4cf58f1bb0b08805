"""Triton programs of the row family: RMSNorm, LayerNorm, and both after a residual add, forward and backward.

A program holds a tile of ``TILE`` rows in registers, ``BLOCK`` (a power of two) columns wide; rows too wide for
that are swept in blocks of columns. Everything is computed in float32, and every sum has an order that depends on
the shape alone. Row numbers are int64: offsets go beyond 2^31 elements.

An argument whose name ends in ``_ptr`` may be None where the tensor is optional: that decides at compile time. So
do the names in capitals: ``CENTER`` (LayerNorm, not RMSNorm), ``LARGE`` (squares of the input may overflow),
``ROUND`` (the dtype that xhat is rounded to before the gain, or None), ``ROUND_OFFSET`` (offset + weight is rounded
to the dtype of the weight).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_tile", "backward_wide", "forward_tile", "forward_wide", "merge"]

_SMALL = tl.constexpr(2.0**-30)


@triton.jit
def _power(peak):
    """Return the power of two that brings ``peak`` below 2^41; 1 if it is there (``_arithmetic.power_of_two``)."""
    exponent = ((peak.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
    return ((127 + 40 - tl.maximum(exponent, 40)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _reciprocal(squares, n, eps):
    """Return 1 / sqrt(squares / n + eps), each operation correctly rounded, so that GPUs agree on it."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, n) + eps))


@triton.jit
def _input(x_ptr, residual_ptr, sum_ptr, x_at, residual_at, mask):
    """Load the input of the norm: x, or x + residual rounded to the dtype of the sum."""
    x = tl.load(x_ptr + x_at, mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + residual_at, mask, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _gain(weight_ptr, offset, cols, size, ROUND_OFFSET: tl.constexpr):
    gain = tl.load(weight_ptr + cols, cols < size, other=0.0).to(tl.float32) + offset
    if ROUND_OFFSET:
        gain = gain.to(weight_ptr.dtype.element_ty).to(tl.float32)
    return gain


@triton.jit
def _affine(
    xhat,
    weight_ptr,
    bias_ptr,
    offset,
    cols,
    size,
    ROUND: tl.constexpr,
    ROUND_OFFSET: tl.constexpr,
):
    """Return round(xhat) * (offset + weight) + bias in float32."""
    y = xhat
    if ROUND is not None:
        y = y.to(ROUND).to(tl.float32)
    if weight_ptr is not None:
        y = y * _gain(weight_ptr, offset, cols, size, ROUND_OFFSET)
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + cols, cols < size, other=0.0).to(tl.float32)
    return y


@triton.jit
def forward_tile(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    stats_ptr,
    rows,
    x_stride,
    residual_stride,
    size,
    eps,
    offset,
    CENTER: tl.constexpr,
    LARGE: tl.constexpr,
    ROUND: tl.constexpr,
    ROUND_OFFSET: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a tile of rows; every element is read once."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = row[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (at < rows) & (cols < size)
    x = _input(x_ptr, residual_ptr, sum_ptr, at * x_stride + cols, at * residual_stride + cols, mask)
    if sum_ptr is not None:
        tl.store(sum_ptr + at * size + cols, x, mask)
    n = size * 1.0
    power = tl.full([TILE], 1.0, tl.float32)
    if LARGE:
        power = _power(tl.max(tl.abs(x), 1))
        x = x * power[:, None]
    if CENTER:
        mean = tl.div_rn(tl.sum(x, 1), n)
        x = tl.where(mask, x - mean[:, None], 0.0)
        if stats_ptr is not None:
            tl.store(stats_ptr + row, tl.div_rn(mean, power), row < rows)
    rstd = _reciprocal(tl.sum(x * x, 1), n, eps)
    if stats_ptr is not None:
        tl.store(stats_ptr + (rows if CENTER else 0) + row, rstd * power, row < rows)
    y = _affine(x * rstd[:, None], weight_ptr, bias_ptr, offset, cols, size, ROUND, ROUND_OFFSET)
    tl.store(y_ptr + at * size + cols, y, mask)


@triton.jit
def _sum_of_squares(x_ptr, residual_ptr, sum_ptr, x_row, residual_row, size, power, mean, BLOCK: tl.constexpr):
    """Return in BLOCK parts the sum over a row of (x * power - mean)^2."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        mask = cols < size
        x = _input(x_ptr, residual_ptr, sum_ptr, x_row + cols, residual_row + cols, mask)
        x = tl.where(mask, x * power - mean, 0.0)
        total += x * x
    return total


@triton.jit
def forward_wide(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    stats_ptr,
    rows,
    x_stride,
    residual_stride,
    size,
    eps,
    offset,
    CENTER: tl.constexpr,
    LARGE: tl.constexpr,
    ROUND: tl.constexpr,
    ROUND_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row, swept twice (RMSNorm) or three times (LayerNorm); once more if its squares may overflow."""
    row = tl.program_id(0).to(tl.int64)
    x_row, residual_row = row * x_stride, row * residual_stride
    n = size * 1.0
    peak = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)  # of squares; if centred, of x * _SMALL, which cannot overflow
    for first in range(0, size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = _input(x_ptr, residual_ptr, sum_ptr, x_row + cols, residual_row + cols, cols < size)
        peak = tl.maximum(peak, tl.abs(x))
        total += x * _SMALL if CENTER else x * x
    power = _power(tl.max(peak)) if LARGE else 1.0
    mean = 0.0
    if CENTER:
        mean = tl.div_rn(tl.sum(total), n) * (power * (1.0 / _SMALL))
        total = _sum_of_squares(x_ptr, residual_ptr, sum_ptr, x_row, residual_row, size, power, mean, BLOCK)
    elif LARGE:  # noqa: SIM102 (decided at compile time; what is in it, at run time)
        if power < 1.0:
            total = _sum_of_squares(x_ptr, residual_ptr, sum_ptr, x_row, residual_row, size, power, mean, BLOCK)
    rstd = _reciprocal(tl.sum(total), n, eps)
    if stats_ptr is not None:
        if CENTER:
            tl.store(stats_ptr + row, tl.div_rn(mean, power))
        tl.store(stats_ptr + (rows if CENTER else 0) + row, rstd * power)
    for first in range(0, size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        mask = cols < size
        x = _input(x_ptr, residual_ptr, sum_ptr, x_row + cols, residual_row + cols, mask)
        if sum_ptr is not None:
            tl.store(sum_ptr + row * size + cols, x, mask)
        xhat = (x * power - mean) * rstd
        y = _affine(xhat, weight_ptr, bias_ptr, offset, cols, size, ROUND, ROUND_OFFSET)
        tl.store(y_ptr + row * size + cols, y, mask)


@triton.jit
def _saved(stats_ptr, row, rows, CENTER: tl.constexpr):
    """Load mean (0 if not centred) and rstd."""
    inside = row < rows
    mean = tl.load(stats_ptr + row, inside, other=0.0) if CENTER else 0.0
    return mean, tl.load(stats_ptr + (rows if CENTER else 0) + row, inside, other=0.0)


@triton.jit
def _normalized(x, mean, rstd, CENTER: tl.constexpr):
    """Return (x - mean) * rstd; at half the size, because x - mean may be beyond float32 where the result is not."""
    return (x * 0.5 - mean * 0.5) * (rstd * 2.0) if CENTER else x * rstd


@triton.jit
def backward_tile(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    stats_ptr,
    weight_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    rows,
    dy_stride,
    dsum_stride,
    x_stride,
    size,
    offset,
    tiles,
    CENTER: tl.constexpr,
    ROUND: tl.constexpr,
    ROUND_OFFSET: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program ``tiles`` tiles of rows, one after the other; row p of ``dweight`` and ``dbias`` is program p's sum.

    With ``dx`` a program takes whole rows; without it, columns from program_id(1) * BLOCK.
    """
    part = tl.program_id(0).to(tl.int64)
    cols = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    n = size * 1.0
    gain = 1.0
    if dx_ptr is not None and weight_ptr is not None:
        gain = _gain(weight_ptr, offset, cols, size, ROUND_OFFSET)
    dweight = tl.zeros([TILE, BLOCK], tl.float32)
    dbias = tl.zeros([TILE, BLOCK], tl.float32)
    for tile in range(tiles):
        row = ((part * tiles + tile) * TILE + tl.arange(0, TILE))[:, None]
        mask = (row < rows) & (cols < size)
        dy = tl.load(dy_ptr + row * dy_stride + cols, mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + cols, mask, other=0.0).to(tl.float32)
        mean, rstd = _saved(stats_ptr, row, rows, CENTER)
        xhat = _normalized(x, mean, rstd, CENTER)
        if dweight_ptr is not None:
            dweight += dy * (xhat if ROUND is None else xhat.to(ROUND).to(tl.float32))
        if dbias_ptr is not None:
            dbias += dy
        if dx_ptr is not None:
            g = dy * gain
            along = tl.div_rn(tl.sum(g * xhat, 1), n)[:, None]
            dx = g - xhat * along
            if CENTER:
                dx -= tl.div_rn(tl.sum(g, 1), n)[:, None]
            dx *= rstd
            if dsum_ptr is not None:
                dx += tl.load(dsum_ptr + row * dsum_stride + cols, mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * size + cols, dx, mask)
    at = part * size + tl.reshape(cols, [BLOCK])
    inside = tl.reshape(cols, [BLOCK]) < size
    if dweight_ptr is not None:
        tl.store(dweight_ptr + at, tl.sum(dweight, 0), inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + at, tl.sum(dbias, 0), inside)


@triton.jit
def backward_wide(
    dy_ptr,
    dsum_ptr,
    x_ptr,
    stats_ptr,
    weight_ptr,
    dx_ptr,
    rows,
    dy_stride,
    dsum_stride,
    x_stride,
    size,
    offset,
    CENTER: tl.constexpr,
    ROUND_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of the input alone, one program a row, swept twice."""
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = _saved(stats_ptr, row, rows, CENTER)
    n = size * 1.0
    along = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        mask = cols < size
        g = tl.load(dy_ptr + row * dy_stride + cols, mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= _gain(weight_ptr, offset, cols, size, ROUND_OFFSET)
        x = tl.load(x_ptr + row * x_stride + cols, mask, other=0.0).to(tl.float32)
        along += g * _normalized(x, mean, rstd, CENTER)
        total += g
    c = tl.div_rn(tl.sum(along), n)
    m = tl.div_rn(tl.sum(total), n) if CENTER else 0.0
    for first in range(0, size, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        mask = cols < size
        g = tl.load(dy_ptr + row * dy_stride + cols, mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= _gain(weight_ptr, offset, cols, size, ROUND_OFFSET)
        x = tl.load(x_ptr + row * x_stride + cols, mask, other=0.0).to(tl.float32)
        dx = (g - _normalized(x, mean, rstd, CENTER) * c - m) * rstd
        if dsum_ptr is not None:
            dx += tl.load(dsum_ptr + row * dsum_stride + cols, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * size + cols, dx, mask)


@triton.jit
def merge(partial_ptr, out_ptr, parts, size, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Add up [parts, size] float32 over its rows: every TILE-th in one accumulator, then those."""
    cols = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for first in range(0, parts, TILE):
        part = (first + tl.arange(0, TILE))[:, None]
        mask = (part < parts) & (cols < size)
        total += tl.load(partial_ptr + part.to(tl.int64) * size + cols, mask, other=0.0)
    cols = tl.reshape(cols, [BLOCK])
    tl.store(out_ptr + cols, tl.sum(total, 0), cols < size)
