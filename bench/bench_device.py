"""Times and memory of the device of a bench's rank; of a CPU rank host times, and no memory."""

import time
from typing import Any

import torch


class BenchDevice:
    """Marks in the order of the current stream, and what torch has allocated."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def mark(self) -> Any:  # noqa: ANN401 - an event or a time; torch leaves its events untyped
        """Return a mark of the current stream."""
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begun: Any, ended: Any) -> float:  # noqa: ANN401 - marks
        """Return the time between two marks; call `synchronize` before."""
        return 1e-3 * float(begun.elapsed_time(ended)) if self.is_cuda else float(ended - begun)

    def synchronize(self) -> None:
        """Wait for all that the device has been given."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Return the bytes of all tensors now."""
        return torch.cuda.memory_allocated() if self.is_cuda else 0

    def reset_peak(self) -> None:
        """Begin a new peak of memory."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the most bytes of all tensors since `reset_peak`."""
        return torch.cuda.max_memory_allocated() if self.is_cuda else 0
