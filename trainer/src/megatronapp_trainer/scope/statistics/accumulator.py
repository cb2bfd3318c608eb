"""Statistics of tensors (`megatronapp_common.scope.layer_statistics`), accumulated on the device without a wait."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatronapp_common.scope.layer_statistics import BINS, COUNTS, FIRST_EXPONENT, MOMENTS, SiteLayer
from megatronapp_trainer.device.compiling import can_compile

SLICE = 1 << 24
"""Most numbers that are reduced at once, in fp32: the memory of a capture does not grow with the tensors."""
_EXPONENTS = 256
"""Exponents of fp32 as its bits hold them: 0 of zeros and the smallest numbers, the last one of NaN and Inf."""
_FIRST_BIN = 127 + FIRST_EXPONENT
"""Exponent of the numbers in the first bin of a histogram, apart from smaller ones."""


class StatisticsAccumulator:
    """Statistics of the sites and layers of one rank in one step, in memory of the device."""

    def __init__(self, rows: Sequence[SiteLayer], device: torch.device) -> None:
        self.rows = tuple(rows)
        self._places = {row: place for place, row in enumerate(self.rows)}
        self._moments = torch.zeros(len(rows), len(MOMENTS), dtype=torch.float64, device=device)
        self._counts = torch.zeros(len(rows), len(COUNTS) + BINS, dtype=torch.int64, device=device)
        self._has_kernel = device.type == "cuda" and can_compile()

    @torch.no_grad()
    def add(self, row: SiteLayer, values: torch.Tensor) -> None:
        """Add all numbers of a tensor of any shape and type."""
        place = self._places[row]
        flat = values.detach().reshape(-1)
        if self._has_kernel and flat.dtype in {torch.float32, torch.bfloat16, torch.float16}:
            from megatronapp_trainer.scope.statistics import statistics_kernels

            statistics_kernels.add(flat.contiguous(), self._moments, self._counts, place)
            return
        for part in torch.split(flat, SLICE):
            if part.numel():
                _add_slice(self._moments[place], self._counts[place], part.float())

    def packed(self) -> torch.Tensor:
        """Return the records of all rows as bytes, on the device."""
        return torch.cat((self._moments.view(torch.int64), self._counts), 1).view(torch.uint8).reshape(-1)


def _add_slice(moments: torch.Tensor, counts: torch.Tensor, values: torch.Tensor) -> None:
    """Add numbers in fp32 in as few passes over memory as torch's operations allow; sums are in fp64."""
    by_exponent = _count_exponents(values)
    zeros, not_numbers = (values == 0).sum(), values.isnan().sum()
    finite = values.nan_to_num(0.0, 0.0, 0.0)
    moments[0] += finite.sum(dtype=torch.float64)
    moments[1] += torch.linalg.vector_norm(finite, dtype=torch.float64).square()
    largest = torch.linalg.vector_norm(finite, float("inf")).double()
    torch.maximum(moments[2], largest, out=moments[2])
    counts[0] += values.numel()
    counts[1] += not_numbers
    counts[2] += by_exponent[-1] - not_numbers
    counts[3] += zeros
    histogram = counts[len(COUNTS) :]
    last = _FIRST_BIN + BINS - 1
    histogram[0] += by_exponent[: _FIRST_BIN + 1].sum() - zeros
    histogram[1:-1] += by_exponent[_FIRST_BIN + 1 : last]
    histogram[-1] += by_exponent[last:-1].sum()


def _count_exponents(values: torch.Tensor) -> torch.Tensor:
    """Count numbers in fp32 by the exponent in their bits, int64 [256]. The host waits for nothing."""
    exponents = values.view(torch.int32).bitwise_right_shift(23).bitwise_and_(_EXPONENTS - 1)
    if not values.is_cuda:
        return torch.bincount(exponents, minlength=_EXPONENTS)  # on a device the host would wait for its size
    with _in_any_order():
        return torch.histc(exponents.float(), _EXPONENTS, 0, _EXPONENTS).long()


@contextlib.contextmanager
def _in_any_order() -> Iterator[None]:
    """Allow atomic additions, which are exact here, in runs that allow only operations of a fixed order."""
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if enabled:
        torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        if enabled:
            torch.use_deterministic_algorithms(True, warn_only=warns)
