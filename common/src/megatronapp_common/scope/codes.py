"""Codes of numbers in the frames of MegaScope: few bytes, with a known error.

Of 32-bit floats x, a row being the last axis:

========  =======================================  ===================================  ====================
code      bytes                                    NaN, infinities                      worst error
========  =======================================  ===================================  ====================
``i8``    round(x / s) as a signed byte, with      NaN -128, -Inf -127, Inf 127         half a step, s / 2
          s = largest finite \\|x\\| of the row / 126
``u8s``   round(255 sqrt(x)), 0 <= x <= 1          NaN 0; others as if clamped          0.00392, near 1
``u8``    round(255 x), 0 <= x <= 1                NaN 0; others as if clamped          0.00197
``f16``   IEEE 754 half precision                  themselves; from 65,520 on infinite  2^-11 of x, or 2^-25
``f32``   x                                        themselves                           none
========  =======================================  ===================================  ====================

Ties go to the even number. s is never below 2^-126, so that nothing is divided by 0. The two codes of probabilities
have no byte to spare: other values of such a row (`surprise`, `entropy`, as ``f32``) are NaN then, too.
Ranks write the same bytes on their device (`megatronapp_trainer.scope.transfer.quantise`), and the page decodes them:
tests/fixtures/scope/codes.json holds all three to it.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.errors import TensorCodeError

STEPS = 126
"""Steps of `i8` on either side of 0."""
INFINITE, MISSING = 127, -128
"""Bytes of `i8` for infinity (negated for the other) and NaN."""
LEAST_SCALE = float(np.finfo(np.float32).tiny)
LARGEST = 255
"""Largest byte of `u8s` and `u8`."""
Floats = NDArray[np.float32]


class TensorCode(enum.StrEnum):
    """Codes of numbers; those of whole numbers, `u32` and `i32`, need no coding."""

    I8 = "i8"
    U8S = "u8s"
    U8 = "u8"
    F16 = "f16"
    F32 = "f32"


DTYPES: Mapping[TensorCode, np.dtype[Any]] = {
    TensorCode.I8: np.dtype("<i1"),
    TensorCode.U8S: np.dtype("<u1"),
    TensorCode.U8: np.dtype("<u1"),
    TensorCode.F16: np.dtype("<f2"),
    TensorCode.F32: np.dtype("<f4"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedArray:
    """Numbers of one code, little endian, in their original shape."""

    data: NDArray[Any]
    scales: Floats | None = None
    """Scale of each row, for `i8`."""


def encode(code: TensorCode, values: NDArray[Any]) -> EncodedArray:
    """Encode numbers, which need at least one axis."""
    numbers = np.asarray(values, np.float32)
    with np.errstate(all="ignore"):
        if code is TensorCode.I8:
            return _signed(numbers)
        return EncodedArray(_ENCODE[code](numbers).astype(DTYPES[code]))


def decode(code: TensorCode, data: NDArray[Any], scales: NDArray[Any] | None = None) -> Floats:
    """Decode to 32-bit floats. Raises TensorCodeError for arrays that are not of this code."""
    if data.dtype != DTYPES[code]:
        raise TensorCodeError(f"{data.dtype} is not what code {code} holds, which is {DTYPES[code]}")
    if code is not TensorCode.I8:
        return _DECODE[code](data.astype(np.float32))
    if scales is None or scales.shape != data.shape[:-1]:
        found = "none" if scales is None else f"those of shape {scales.shape}"
        raise TensorCodeError(f"code i8 of shape {data.shape} needs scales of shape {data.shape[:-1]}, not {found}")
    steps = np.take(_STEPS, data.view(np.uint8))
    return steps * scales.astype(np.float32)[..., None]


def _steps() -> Floats:
    """Return the value of each byte of `i8`, in steps."""
    worth = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    worth[[MISSING, INFINITE, -INFINITE]] = np.nan, np.inf, -np.inf
    return worth


_STEPS = _steps()


def _signed(numbers: Floats) -> EncodedArray:
    finite = np.where(np.isfinite(numbers), np.abs(numbers), np.float32(0))
    scales = np.maximum(finite.max(axis=-1, initial=0) / np.float32(STEPS), np.float32(LEAST_SCALE))
    steps = np.clip(np.rint(numbers / scales[..., None]), -INFINITE, INFINITE)
    return EncodedArray(np.nan_to_num(steps, nan=MISSING).astype(DTYPES[TensorCode.I8]), scales.astype("<f4"))


def _clamped(numbers: Floats) -> Floats:
    return np.clip(np.nan_to_num(numbers, nan=0.0), np.float32(0), np.float32(1))


def _same(numbers: Floats) -> Floats:
    return numbers


_ENCODE: Mapping[TensorCode, Callable[[Floats], NDArray[Any]]] = {
    TensorCode.U8S: lambda numbers: np.rint(np.sqrt(_clamped(numbers)) * np.float32(LARGEST)),
    TensorCode.U8: lambda numbers: np.rint(_clamped(numbers) * np.float32(LARGEST)),
    TensorCode.F16: _same,
    TensorCode.F32: _same,
}
_DECODE: Mapping[TensorCode, Callable[[Floats], Floats]] = {
    TensorCode.U8S: lambda numbers: np.square(numbers / np.float32(LARGEST)),
    TensorCode.U8: lambda numbers: numbers / np.float32(LARGEST),
    TensorCode.F16: _same,
    TensorCode.F32: _same,
}
