"""Bias and activation of an MLP in one kernel each way. R tokens, F width inside the MLP on this rank.

Sums and products round to the precision of the tensors where separate kernels of torch would.
"""

import enum
from typing import Any

import torch
import triton
import triton.language as tl

from megatronapp_trainer.models.kernels.columns import total_of_parts

_WIDE, _ROWS, _PART_ROWS = 256, 8, 32


class Activation(enum.IntEnum):
    """Function of the MLP."""

    GELU = 0
    GELU_TANH = 1
    SWIGLU = 2
    """silu(gate) times up; the first half of the channels is the gate."""


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        result = x * tl.sigmoid(2.0 * inner)
    else:
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return result


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr):
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        half = tl.sigmoid(2.0 * inner)
        slope = half + 2.0 * x * half * (1.0 - half) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    else:
        slope = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return slope


@triton.jit
def _with_bias(values, bias, places, inside, HAS_BIAS: tl.constexpr):
    """Add the bias, and round as a sum in the tensor's precision does."""
    result = values.to(tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
        result = (result + added[None, :]).to(values.dtype).to(tl.float32)
    return result


@triton.jit
def _activation_forward(
    inputs,
    bias,
    result,
    rows,
    width,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    places = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    lines = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = places < width
    mask = (lines < rows)[:, None] & inside[None, :]
    if KIND == 2:
        source = inputs + lines[:, None] * (2 * width) + places[None, :]
        gate = _with_bias(tl.load(source, mask=mask, other=0.0), bias, places, inside, HAS_BIAS)
        up = _with_bias(tl.load(source + width, mask=mask, other=0.0), bias + width, places, inside, HAS_BIAS)
        value = (gate * tl.sigmoid(gate)).to(result.dtype.element_ty).to(tl.float32) * up
    else:
        source = inputs + lines[:, None] * width + places[None, :]
        value = _gelu(_with_bias(tl.load(source, mask=mask, other=0.0), bias, places, inside, HAS_BIAS), KIND == 1)
    tl.store(result + lines[:, None] * width + places[None, :], value.to(result.dtype.element_ty), mask=mask)


@triton.jit
def _activation_backward(
    inputs,
    bias,
    gradient,
    result,
    parts,
    rows,
    width,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    PART_ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the gradient of the inputs, and the sum over this program's rows as a part of the bias' gradient."""
    places = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = places < width
    total = tl.zeros([ROWS, WIDE], dtype=tl.float32)  # added up across threads once, at the end
    total_up = tl.zeros([ROWS, WIDE], dtype=tl.float32)
    for start in range(0, PART_ROWS, ROWS):
        lines = (tl.program_id(0) * PART_ROWS + start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (lines < rows)[:, None] & inside[None, :]
        given = tl.load(gradient + lines[:, None] * width + places[None, :], mask=mask, other=0.0).to(tl.float32)
        if KIND == 2:
            where = lines[:, None] * (2 * width) + places[None, :]
            gate = _with_bias(tl.load(inputs + where, mask=mask, other=0.0), bias, places, inside, HAS_BIAS)
            up = tl.load(inputs + where + width, mask=mask, other=0.0)
            up = _with_bias(up, bias + width, places, inside, HAS_BIAS)
            sigmoid = tl.sigmoid(gate)
            active = (gate * sigmoid).to(result.dtype.element_ty).to(tl.float32)
            to_active = (given * up).to(result.dtype.element_ty).to(tl.float32)
            to_gate = (to_active * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(result.dtype.element_ty)
            to_up = (given * active).to(result.dtype.element_ty)
            tl.store(result + where, to_gate, mask=mask)
            tl.store(result + where + width, to_up, mask=mask)
            total += to_gate.to(tl.float32)
            total_up += to_up.to(tl.float32)
        else:
            where = lines[:, None] * width + places[None, :]
            x = _with_bias(tl.load(inputs + where, mask=mask, other=0.0), bias, places, inside, HAS_BIAS)
            value = (given * _gelu_slope(x, KIND == 1)).to(result.dtype.element_ty)
            tl.store(result + where, value, mask=mask)
            total += value.to(tl.float32)
    if HAS_BIAS:
        channels = 2 * width if KIND == 2 else width
        target = parts + tl.program_id(0).to(tl.int64) * channels + places
        tl.store(target, tl.sum(total, 0), mask=inside)
        if KIND == 2:
            tl.store(target + width, tl.sum(total_up, 0), mask=inside)


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, bias: torch.Tensor | None, kind: int) -> torch.Tensor:  # noqa: ANN401
        rows, channels = inputs.shape
        width = channels // 2 if kind == Activation.SWIGLU else channels
        result = inputs.new_empty((rows, width))
        grid = (triton.cdiv(rows, _ROWS), triton.cdiv(width, _WIDE))
        _activation_forward[grid](
            inputs,
            inputs if bias is None else bias,
            result,
            rows,
            width,
            KIND=kind,
            HAS_BIAS=bias is not None,
            ROWS=_ROWS,
            WIDE=_WIDE,
        )
        ctx.save_for_backward(inputs, bias)
        ctx.kind, ctx.width = kind, width
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        inputs, bias = ctx.saved_tensors
        rows, channels = inputs.shape
        count = triton.cdiv(rows, _PART_ROWS)
        result = torch.empty_like(inputs)
        parts = inputs.new_empty((count if bias is not None else 0, channels), dtype=torch.float32)
        _activation_backward[(count, triton.cdiv(ctx.width, _WIDE))](
            inputs,
            inputs if bias is None else bias,
            gradient.contiguous(),
            result,
            parts if bias is not None else inputs,
            rows,
            ctx.width,
            KIND=ctx.kind,
            HAS_BIAS=bias is not None,
            ROWS=_ROWS,
            PART_ROWS=_PART_ROWS,
            WIDE=_WIDE,
        )
        return result, None if bias is None else total_of_parts(parts, bias.dtype), None


def bias_activation(inputs: torch.Tensor, bias: torch.Tensor | None, kind: Activation) -> torch.Tensor:
    """Add the bias [C] to inputs [.., C] and apply the function -> [.., F]; C is 2 F with SwiGLU, F otherwise."""
    rows = inputs.contiguous().view(-1, inputs.size(-1))
    result: torch.Tensor = _BiasActivation.apply(rows, bias, int(kind))
    return result.view(*inputs.shape[:-1], -1)
