"""Statistics of tensors (`megatronapp_common.scope.layer_statistics`), accumulated on the device without a wait."""

from collections.abc import Sequence

import torch

from megatronapp_common.scope.layer_statistics import BINS, COUNTS, FIRST_EXPONENT, MOMENTS, SiteLayer

SLICE = 1 << 22
"""Most numbers that are reduced at once, in fp64: the memory of a capture does not grow with the tensors."""
_COPIES = 64
"""Copies of a histogram that are counted into, so that the threads of a GPU rarely meet at one number."""


class StatisticsAccumulator:
    """Statistics of the sites and layers of one rank in one step, in memory of the device."""

    def __init__(self, rows: Sequence[SiteLayer], device: torch.device) -> None:
        self.rows = tuple(rows)
        self._places = {row: place for place, row in enumerate(self.rows)}
        self._moments = torch.zeros(len(rows), len(MOMENTS), dtype=torch.float64, device=device)
        self._counts = torch.zeros(len(rows), len(COUNTS) + BINS, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, row: SiteLayer, values: torch.Tensor) -> None:
        """Add all numbers of a tensor of any shape and type."""
        place = self._places[row]
        flat = values.detach().reshape(-1)
        for part in torch.split(flat, SLICE):
            self._add_slice(self._moments[place], self._counts[place], part.double())

    def packed(self) -> torch.Tensor:
        """Return the records of all rows as bytes, on the device."""
        return torch.cat((self._moments.view(torch.int64), self._counts), 1).view(torch.uint8).reshape(-1)

    @staticmethod
    def _add_slice(moments: torch.Tensor, counts: torch.Tensor, values: torch.Tensor) -> None:
        is_nan, is_inf = values.isnan(), values.isinf()
        finite = values.masked_fill(is_nan | is_inf, 0.0)
        magnitudes = finite.abs()
        moments[0] += finite.sum()
        moments[1] += finite.square().sum()
        if values.numel():
            torch.maximum(moments[2], magnitudes.max(), out=moments[2])
        found_nan, found_inf = is_nan.sum(), is_inf.sum()
        zeros = (magnitudes == 0).sum() - found_nan - found_inf
        counts[0] += values.numel()
        counts[1] += found_nan
        counts[2] += found_inf
        counts[3] += zeros
        counts[len(COUNTS) :] += _histogram(magnitudes)


def _histogram(magnitudes: torch.Tensor) -> torch.Tensor:
    """Count magnitudes by power of two, without 0. No part of it depends on how many there are of a kind, so that the
    host waits for nothing.
    """
    exponents = torch.frexp(magnitudes).exponent.long() - (1 + FIRST_EXPONENT)
    bins = exponents.clamp_(0, BINS - 1).masked_fill_(magnitudes == 0, BINS)
    bins += torch.arange(bins.numel(), device=bins.device).remainder_(_COPIES) * (BINS + 1)
    counts = torch.zeros(_COPIES * (BINS + 1), dtype=torch.int32, device=bins.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32))
    return counts.view(_COPIES, BINS + 1).sum(0)[:BINS]
