"""Bias and residual sum in one kernel. R tokens, H width of the residual stream."""

from typing import Any

import torch
import triton
import triton.language as tl

from megatronapp_trainer.models.kernels.columns import column_sums

_WIDE, _ROWS = 512, 4


@triton.jit
def _residual_add(
    branch, bias, residual, result, rows, width, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):
    places = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    lines = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = places < width
    mask = (lines < rows)[:, None] & inside[None, :]
    where = lines[:, None] * width + places[None, :]
    given = tl.load(branch + where, mask=mask, other=0.0)
    value = given.to(tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
        value = (value + added[None, :]).to(given.dtype).to(tl.float32)
    value += tl.load(residual + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + where, value.to(result.dtype.element_ty), mask=mask)


class _BiasResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, branch: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        rows, width = branch.shape
        result = torch.empty_like(branch)
        grid = (triton.cdiv(rows, _ROWS), triton.cdiv(width, _WIDE))
        _residual_add[grid](
            branch,
            branch if bias is None else bias,
            residual,
            result,
            rows,
            width,
            HAS_BIAS=bias is not None,
            ROWS=_ROWS,
            WIDE=_WIDE,
        )
        ctx.has_bias = bias is not None
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        return gradient, column_sums(gradient.contiguous()) if ctx.has_bias else None, gradient


def bias_residual(branch: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """Return residual + (branch + bias), [.., H] each and bias [H], rounded after each sum as torch does."""
    width = branch.size(-1)
    rows = branch.contiguous().view(-1, width)
    result: torch.Tensor = _BiasResidual.apply(rows, bias, residual.contiguous().view(-1, width))
    return result.view(branch.shape)
