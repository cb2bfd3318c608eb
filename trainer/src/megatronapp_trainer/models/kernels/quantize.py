"""Rounding of matrices [R, C] to numbers of 8 bits with a scale for each row or column, on GPUs."""

import torch
import triton
import triton.language as tl

_WIDEST_BLOCK = 4096
_NARROW, _LONG = 32, 128


@triton.jit
def _quantize_row(matrix, values, scales, columns: tl.constexpr, largest, smallest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        read = tl.load(matrix + row * columns + places, mask=places < columns, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(read))
    scale = tl.div_rn(tl.max(top, 0), largest)
    scale = tl.where(scale < smallest, smallest, scale)
    tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        places = start + tl.arange(0, BLOCK)
        read = tl.load(matrix + row * columns + places, mask=places < columns, other=0.0).to(tl.float32)
        rounded = tl.div_rn(read, scale).to(values.dtype.element_ty)
        tl.store(values + row * columns + places, rounded, mask=places < columns)


@triton.jit
def _quantize_column_block(
    matrix, values, scales, rows: tl.constexpr, columns, largest, smallest, NARROW: tl.constexpr, LONG: tl.constexpr
):
    places = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    inside = places < columns
    top = tl.zeros([LONG, NARROW], dtype=tl.float32)
    for start in range(0, rows, LONG):
        lines = start + tl.arange(0, LONG)
        mask = (lines < rows)[:, None] & inside[None, :]
        read = tl.load(matrix + lines.to(tl.int64)[:, None] * columns + places[None, :], mask=mask, other=0.0)
        top = tl.maximum(top, tl.abs(read.to(tl.float32)))
    scale = tl.div_rn(tl.max(top, 0), largest)
    scale = tl.where(scale < smallest, smallest, scale)
    tl.store(scales + places, scale, mask=inside)
    for start in range(0, rows, LONG):
        lines = start + tl.arange(0, LONG)
        mask = (lines < rows)[:, None] & inside[None, :]
        read = tl.load(matrix + lines.to(tl.int64)[:, None] * columns + places[None, :], mask=mask, other=0.0)
        rounded = tl.div_rn(read.to(tl.float32), scale[None, :]).to(values.dtype.element_ty)
        where = places.to(tl.int64)[:, None] * rows + lines[None, :]
        tl.store(values + where, tl.trans(rounded), mask=tl.trans(mask))


def quantize_rows(matrix: torch.Tensor, largest: float, smallest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each row of a contiguous matrix by its scale and round to e4m3 -> [R, C], and scales [R, 1] in fp32.

    `largest` number after the division; `smallest` scale, for rows of zeros.
    """
    rows, columns = matrix.shape
    values = torch.empty_like(matrix, dtype=torch.float8_e4m3fn)
    scales = matrix.new_empty((rows, 1), dtype=torch.float32)
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(columns))
    _quantize_row[(rows,)](matrix, values, scales, columns, largest, smallest, BLOCK=block, num_warps=8)
    return values, scales


def quantize_columns(matrix: torch.Tensor, largest: float, smallest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same for each column, and transpose -> [C, R], and scales [C, 1] in fp32."""
    rows, columns = matrix.shape
    values = matrix.new_empty((columns, rows), dtype=torch.float8_e4m3fn)
    scales = matrix.new_empty((columns, 1), dtype=torch.float32)
    grid = (triton.cdiv(columns, _NARROW),)
    _quantize_column_block[grid](matrix, values, scales, rows, columns, largest, smallest, NARROW=_NARROW, LONG=_LONG)
    return values, scales
