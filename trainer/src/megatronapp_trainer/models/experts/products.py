"""Products of many groups of rows with a matrix each: one kernel where torch has it, or a loop.

Shapes: N rows of all groups, sorted by group, G groups, K inputs, M outputs.
"""

import torch


def can_group(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has a kernel for all groups at once."""
    return device.type == "cuda" and dtype is torch.bfloat16


def grouped_product(
    rows_NK: torch.Tensor, weight_GMK: torch.Tensor, counts_G: torch.Tensor, *, fused: bool
) -> torch.Tensor:
    """Multiply each group of rows by the transpose of its matrix -> [N, M].

    `counts_G`: number of rows of each group, whose sum is N. `fused`: in a single kernel, if `can_group` allows it.
    """
    if fused and can_group(rows_NK.device, rows_NK.dtype):
        return fused_product(rows_NK, weight_GMK, counts_G)
    return product_in_loop(rows_NK, weight_GMK, counts_G)


def fused_product(rows_NK: torch.Tensor, weight_GMK: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """Compute `grouped_product` with torch's kernel, which takes the ends of groups on the device."""
    ends = counts_G.to(rows_NK.device, non_blocking=True).cumsum(0).to(torch.int32)
    product: torch.Tensor = torch._grouped_mm(rows_NK, weight_GMK.transpose(1, 2), offs=ends)
    return product


def product_in_loop(rows_NK: torch.Tensor, weight_GMK: torch.Tensor, counts_G: torch.Tensor) -> torch.Tensor:
    """Compute `grouped_product` group by group.

    A group without rows takes part, so that its matrix has a gradient of zeros on every rank.
    """
    parts = torch.split(rows_NK, counts_G.tolist())
    products = [torch.nn.functional.linear(part, weight) for part, weight in zip(parts, weight_GMK, strict=True)]
    return torch.cat(products)
