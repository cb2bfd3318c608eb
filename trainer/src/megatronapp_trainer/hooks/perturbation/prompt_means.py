"""Means of a site over the positions of each prompt, kept by slot while its request generates."""

import torch

from megatronapp_trainer.hooks.perturbation.row_context import RowContext


class PromptMeans:
    """Running sums of one site in one layer, in float64: sizes of prompt chunks change a mean by rounding alone."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._sums: torch.Tensor | None = None
        self._means: torch.Tensor | None = None

    def replacement(self, value: torch.Tensor, rows: RowContext) -> torch.Tensor:
        """Add the rows of prompts; return the mean of each row's prompt, which is right from its last token on."""
        if self._sums is None or self._means is None:
            self._sums = torch.zeros((self._slots, *value.shape[1:]), dtype=torch.float64, device=value.device)
            self._means = torch.zeros_like(self._sums, dtype=value.dtype)
        for part in rows.parts:
            if part.start == 0:
                self._sums[part.slot].zero_()
            self._sums[part.slot] += value[part.prompt_rows].double().sum(0)
            if part.ends_prompt:
                self._means[part.slot] = (self._sums[part.slot] / part.prompt_length).to(value.dtype)
        return self._means.index_select(0, rows.slots_N)
