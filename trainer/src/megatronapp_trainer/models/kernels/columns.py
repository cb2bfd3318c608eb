"""Sums over the rows of a matrix [R, C] with accumulation in fp32: gradients of biases and of norms' weights."""

import torch
import triton
import triton.language as tl

_WIDE, _ROWS = 128, 32
_NARROW, _LONG = 32, 64
MOST_PARTS = 64
"""Parts of the rows that are added up apart, so that many columns' sums fill a device."""


@triton.jit
def _column_parts(matrix, parts, rows, columns, part_rows: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    part = tl.program_id(0)
    places = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = places < columns
    total = tl.zeros([ROWS, WIDE], dtype=tl.float32)  # added up across threads once, at the end
    for start in range(0, part_rows, ROWS):
        lines = part * part_rows + start + tl.arange(0, ROWS)
        mask = (lines < rows)[:, None] & inside[None, :]
        where = lines.to(tl.int64)[:, None] * columns + places[None, :]
        total += tl.load(matrix + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(parts + part * columns + places, tl.sum(total, 0), mask=inside)


@triton.jit
def _column_total(parts, result, count: tl.constexpr, columns, ROWS: tl.constexpr, WIDE: tl.constexpr):
    places = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    inside = places < columns
    total = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for start in range(0, count, ROWS):
        lines = start + tl.arange(0, ROWS)
        mask = (lines < count)[:, None] & inside[None, :]
        where = lines.to(tl.int64)[:, None] * columns + places[None, :]
        total += tl.load(parts + where, mask=mask, other=0.0)
    tl.store(result + places, tl.sum(total, 0).to(result.dtype.element_ty), mask=inside)


def total_of_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add the rows of contiguous fp32 parts [P, C] up -> [C]; the order depends on P alone."""
    count, columns = parts.shape
    result = parts.new_empty(columns, dtype=dtype)
    _column_total[(triton.cdiv(columns, _NARROW),)](parts, result, count, columns, ROWS=_LONG, WIDE=_NARROW)
    return result


def column_sums(matrix: torch.Tensor) -> torch.Tensor:
    """Add the rows of a contiguous matrix [R, C] up in fp32 -> [C], in its precision; the order depends on R alone."""
    rows, columns = matrix.shape
    part_rows = _ROWS * triton.cdiv(triton.cdiv(rows, MOST_PARTS), _ROWS)
    count = triton.cdiv(rows, part_rows)
    parts = matrix.new_empty((count, columns), dtype=torch.float32)
    grid = (count, triton.cdiv(columns, _WIDE))
    _column_parts[grid](matrix, parts, rows, columns, part_rows, ROWS=_ROWS, WIDE=_WIDE)
    return total_of_parts(parts, matrix.dtype)
