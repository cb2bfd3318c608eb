"""LayerNorm and RMSNorm, with the gradients of their weights in the same kernel. R tokens, H width."""

from typing import Any

import torch
import triton
import triton.language as tl

from megatronapp_trainer.models.kernels.columns import total_of_parts

WIDEST = 16384
"""Largest width: a row is one block in registers."""
_PARTS = 264


@triton.jit
def _norm_forward(inputs, weight, bias, result, means, scales, width, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < width
    x = tl.load(inputs + row * width + places, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 0) / width
        x = tl.where(inside, x - mean, 0.0)
        tl.store(means + row, mean)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(scales + row, scale)
    value = x * scale * tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        value += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row * width + places, value.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    inputs,
    weight,
    gradient,
    means,
    scales,
    result,
    parts,
    rows,
    width,
    part_rows: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of this program's rows, and their sums as a part of the gradients of weight and bias."""
    part = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    inside = places < width
    factor = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    to_weight = tl.zeros([BLOCK], dtype=tl.float32)
    to_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for line in range(part_rows):
        row = (part * part_rows + line).to(tl.int64)
        if row < rows:
            x = tl.load(inputs + row * width + places, mask=inside, other=0.0).to(tl.float32)
            given = tl.load(gradient + row * width + places, mask=inside, other=0.0).to(tl.float32)
            scale = tl.load(scales + row)
            if CENTRED:
                x = tl.where(inside, x - tl.load(means + row), 0.0)
            x = x * scale
            to_weight += given * x
            if CENTRED:
                to_bias += given
            given = given * factor
            value = given - x * (tl.sum(given * x, 0) / width)
            if CENTRED:
                value -= tl.sum(given, 0) / width
            tl.store(result + row * width + places, (value * scale).to(result.dtype.element_ty), mask=inside)
    if CENTRED:
        tl.store(parts + part * 2 * width + places, to_weight, mask=inside)
        tl.store(parts + part * 2 * width + width + places, to_bias, mask=inside)
    else:
        tl.store(parts + part * width + places, to_weight, mask=inside)


def _block(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        rows, width = inputs.shape
        result = torch.empty_like(inputs)
        means, scales = inputs.new_empty((2, rows), dtype=torch.float32)
        _norm_forward[(rows,)](
            inputs,
            weight,
            weight if bias is None else bias,
            result,
            means,
            scales,
            width,
            eps,
            CENTRED=bias is not None,
            **_block(width),
        )
        ctx.save_for_backward(inputs, weight, means, scales)
        ctx.is_centred = bias is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        inputs, weight, means, scales = ctx.saved_tensors
        rows, width = inputs.shape
        part_rows = triton.cdiv(rows, _PARTS)
        count = triton.cdiv(rows, part_rows)
        result = torch.empty_like(inputs)
        parts = inputs.new_empty((count, 2 * width if ctx.is_centred else width), dtype=torch.float32)
        _norm_backward[(count,)](
            inputs,
            weight,
            gradient.contiguous(),
            means,
            scales,
            result,
            parts,
            rows,
            width,
            part_rows,
            CENTRED=ctx.is_centred,
            **_block(width),
        )
        total = total_of_parts(parts, weight.dtype)
        return result, total[:width], total[width:] if ctx.is_centred else None, None


def norm(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise inputs [.., H] over the last axis: LayerNorm with a bias [H], RMSNorm without; statistics in fp32."""
    rows = inputs.contiguous().view(-1, inputs.size(-1))
    result: torch.Tensor = _Norm.apply(rows, weight, bias, eps)
    return result.view(inputs.shape)
