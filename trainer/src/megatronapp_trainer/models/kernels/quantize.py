"""Rounding of matrices [R, C] to numbers of 8 bits with a scale for each row or column, on GPUs."""

import torch
import triton
import triton.language as tl

_WIDEST_BLOCK = 8192
_TILE_ROWS, _TILE_COLUMNS = 64, 64
_PART_ROWS = 256
"""Rows whose largest numbers are found apart, so that the parts of a weight fill a device."""


@triton.jit
def _quantize_row(matrix, values, scales, columns: tl.constexpr, largest, smallest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        read = tl.load(matrix + row * columns + start + places, mask=start + places < columns, other=0.0)
        top = tl.maximum(top, tl.abs(read.to(tl.float32)))
    scale = tl.div_rn(tl.max(top, 0), largest)
    scale = tl.where(scale < smallest, smallest, scale)
    tl.store(scales + row, scale)
    factor = tl.div_rn(1.0, scale)
    for start in range(0, columns, BLOCK):
        mask = start + places < columns
        read = tl.load(matrix + row * columns + start + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(values + row * columns + start + places, (read * factor).to(values.dtype.element_ty), mask=mask)


@triton.jit
def _column_maxima(matrix, maxima, rows, columns, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    part = tl.program_id(0)
    places = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = places < columns
    top = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, PART, ROWS):
        lines = part * PART + start + tl.arange(0, ROWS)
        mask = (lines < rows)[:, None] & inside[None, :]
        read = tl.load(matrix + lines.to(tl.int64)[:, None] * columns + places[None, :], mask=mask, other=0.0)
        top = tl.maximum(top, tl.abs(read.to(tl.float32)))
    tl.store(maxima + part.to(tl.int64) * columns + places, tl.max(top, 0), mask=inside)


@triton.jit
def _quantize_transposed(
    matrix,
    maxima,
    values,
    scales,
    rows,
    columns,
    parts: tl.constexpr,
    largest,
    smallest,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    lines = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = places < columns
    top = tl.zeros([COLUMNS], dtype=tl.float32)
    for part in range(parts):
        top = tl.maximum(top, tl.load(maxima + part * columns + places, mask=inside, other=0.0))
    scale = tl.div_rn(top, largest)
    scale = tl.where(scale < smallest, smallest, scale)
    if tl.program_id(0) == 0:
        tl.store(scales + places, scale, mask=inside)
    mask = (lines < rows)[:, None] & inside[None, :]
    read = tl.load(matrix + lines.to(tl.int64)[:, None] * columns + places[None, :], mask=mask, other=0.0)
    rounded = (read.to(tl.float32) * tl.div_rn(1.0, scale)[None, :]).to(values.dtype.element_ty)
    where = places.to(tl.int64)[:, None] * rows + lines[None, :]
    tl.store(values + where, tl.trans(rounded), mask=tl.trans(mask))


def quantize_rows(
    matrix: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, largest: float, smallest: float
) -> None:
    """Divide each row of a contiguous matrix by its scale and round to e4m3 -> values [R, C], scales [R, 1] in fp32.

    `largest` number after the division; `smallest` scale, for rows of zeros. The division is a product with the
    reciprocal of the scale, which rounds a few numbers in ten thousand to the other neighbour.
    """
    rows, columns = matrix.shape
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(columns))
    warps = max(1, min(8, block // 512))  # 16 numbers of a thread, in loads of 16 bytes
    _quantize_row[(rows,)](matrix, values, scales, columns, largest, smallest, BLOCK=block, num_warps=warps)


def quantize_columns(
    matrix: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, largest: float, smallest: float
) -> None:
    """Do the same for each column, and transpose -> values [C, R], scales [C, 1] in fp32."""
    rows, columns = matrix.shape
    parts, blocks = triton.cdiv(rows, _PART_ROWS), triton.cdiv(columns, _TILE_COLUMNS)
    maxima = matrix.new_empty((parts, columns), dtype=torch.float32)
    tile = {"ROWS": _TILE_ROWS, "COLUMNS": _TILE_COLUMNS}
    _column_maxima[(parts, blocks)](matrix, maxima, rows, columns, PART=_PART_ROWS, **tile)
    _quantize_transposed[(triton.cdiv(rows, _TILE_ROWS), blocks)](
        matrix, maxima, values, scales, rows, columns, parts, largest, smallest, **tile
    )
