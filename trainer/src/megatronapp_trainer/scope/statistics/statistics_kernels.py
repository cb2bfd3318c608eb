"""Statistics of a tensor on a GPU in one pass over its memory; `accumulator` has the same rule in plain torch.

Numbers of a block are counted by class with a histogram in registers: one class for each bin, and one each for zeros,
NaN and Inf. Sums are in fp64, and added in any order.
"""

import torch
import triton
import triton.language as tl

from megatronapp_common.scope.layer_statistics import BINS, COUNTS, FIRST_EXPONENT, MOMENTS

_SIZE = 4096
_PROGRAMS = 4 * 132
"""Most programs of a launch: four for each multiprocessor of an H100. Each takes many blocks."""
_CLASSES = 64
assert BINS + 3 < _CLASSES
assert COUNTS == ("count", "nan", "inf", "zero")
assert MOMENTS == ("sum", "squares", "largest")


@triton.jit(do_not_specialize=["count", "row"])  # type: ignore[untyped-decorator] # untyped library
def _add(  # type: ignore[no-untyped-def] # types are the compiler's
    values, moments, moment_bits, counts, count, row,
    FIRST: tl.constexpr, BINS: tl.constexpr, CLASSES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program: every n-th block, of n programs."""
    program, stride = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64) * SIZE
    total = tl.zeros([SIZE], tl.float64)
    squares = tl.zeros([SIZE], tl.float64)
    largest = tl.zeros([SIZE], tl.float32)
    found = tl.zeros([CLASSES], tl.int32)
    for start in range(program * SIZE, count, stride):
        place = start + tl.arange(0, SIZE)
        inside = place < count
        value = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 255
        is_finite = exponent < 255
        finite = tl.where(is_finite, value, 0.0)
        total += finite.to(tl.float64)
        squares += finite.to(tl.float64) * finite.to(tl.float64)
        largest = tl.maximum(largest, tl.abs(finite))
        number = tl.minimum(tl.maximum(exponent - FIRST, 0), BINS - 1)
        number = tl.where(value == 0.0, BINS, number)
        number = tl.where(is_finite, number, tl.where((bits & 0x7FFFFF) != 0, BINS + 1, BINS + 2))
        found += tl.histogram(tl.where(inside, number, CLASSES - 1), CLASSES)
    tl.atomic_add(moments + row * 3, tl.sum(total, 0))
    tl.atomic_add(moments + row * 3 + 1, tl.sum(squares, 0))
    # Numbers that are not negative are in the order of their bits.
    tl.atomic_max(moment_bits + row * 3 + 2, tl.max(largest, 0).to(tl.float64).to(tl.int64, bitcast=True))
    number = tl.arange(0, CLASSES)
    here = counts + row * (4 + BINS)
    column = tl.where(number < BINS, 4 + number, tl.where(number == BINS, 3, number - BINS))
    tl.atomic_add(here + column, found.to(tl.int64), mask=number < BINS + 3)
    tl.atomic_add(here, tl.sum(tl.where(number < CLASSES - 1, found, 0), 0).to(tl.int64))


def add(values: torch.Tensor, moments: torch.Tensor, counts: torch.Tensor, row: int) -> None:
    """Add a contiguous tensor of fp32, bf16 or fp16 to a row of fp64 [rows, 3] and int64 [rows, 4 + BINS]."""
    blocks = triton.cdiv(values.numel(), _SIZE)
    if blocks:
        _add[(min(blocks, _PROGRAMS),)](
            values, moments, moments.view(torch.int64), counts, values.numel(), row,
            FIRST=127 + FIRST_EXPONENT, BINS=BINS, CLASSES=_CLASSES, SIZE=_SIZE,
        )  # fmt: skip
