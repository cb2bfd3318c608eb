"""Masks of causal attention: bool, true where a token is masked. S sequence."""

import functools

import torch


@functools.lru_cache(maxsize=4)
def causal_mask(length: int, device: torch.device, *, window: tuple[int, int] | None = None) -> torch.Tensor:
    """Return [S, S], true above the diagonal and, with a window (LEFT, 0), more than LEFT below it."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu_(diagonal=1)
    if window is not None:
        mask |= torch.ones_like(mask).tril_(diagonal=-window[0] - 1)
    return mask
