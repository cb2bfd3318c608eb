"""Codes of numbers, written on the device: the bytes that `megatronapp_common.scope.codes` writes.

All go into buffers that are there already; nothing is waited for.
"""

import torch

from megatronapp_common.scope.codes import INFINITE, LARGEST, LEAST_SCALE, MISSING, STEPS, TensorCode

DTYPES = {
    TensorCode.I8: torch.int8,
    TensorCode.U8S: torch.uint8,
    TensorCode.U8: torch.uint8,
    TensorCode.F16: torch.float16,
    TensorCode.F32: torch.float32,
}


@torch.no_grad()
def encode_into(code: TensorCode, values: torch.Tensor, data: torch.Tensor, scales: torch.Tensor | None = None) -> None:
    """Write 32-bit floats into `data`, which has their shape, and for `i8` the scale of each row into `scales`."""
    if code is TensorCode.I8:
        assert scales is not None
        _signed(values, data, scales)
    elif code is TensorCode.U8S:
        data.copy_((_clamped(values).sqrt() * LARGEST).round())
    elif code is TensorCode.U8:
        data.copy_((_clamped(values) * LARGEST).round())
    else:
        data.copy_(values)


def _clamped(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=0.0).clamp(0, 1)


def _signed(values: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    finite = torch.where(values.isfinite(), values.abs(), 0.0)
    scales.copy_((finite.amax(-1) / STEPS).clamp(min=LEAST_SCALE))
    steps = (values / scales.unsqueeze(-1)).round().clamp(-INFINITE, INFINITE)
    data.copy_(steps.nan_to_num(nan=float(MISSING)))
