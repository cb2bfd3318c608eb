"""Addition of time for a fault: a sleep on the CPU, a busy kernel in the rank's own stream on CUDA.

A busy loop on the CPU would take the cores of its peers, which a slow processor does not do.
"""

import time
from typing import Any

import torch

NS_PER_MS = 1e6
PROBE_CYCLES = 20_000_000  # about 10 ms at 2 GHz: long against the launch, short for a person


def host_stall(length_ns: int) -> None:
    """Stop this thread for `length_ns`."""
    if length_ns > 0:
        time.sleep(length_ns / 1e9)


def _event() -> Any:  # noqa: ANN401 - torch leaves its events untyped
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _busy(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class DeviceStall:
    """Keeps the current CUDA stream busy for a time. Calibrated once, before training."""

    def __init__(self) -> None:
        self._cycles_per_ns = 0.0

    def calibrate(self) -> None:
        """Measure the device's clock; waits for the device."""
        start, end = _event(), _event()
        _busy(PROBE_CYCLES)  # raises the clock before the measurement
        start.record()
        _busy(PROBE_CYCLES)
        end.record()
        end.synchronize()
        self._cycles_per_ns = PROBE_CYCLES / (start.elapsed_time(end) * NS_PER_MS)

    def __call__(self, length_ns: int) -> None:
        """Enqueue a kernel that lasts `length_ns`."""
        if length_ns > 0:
            _busy(round(length_ns * self._cycles_per_ns))
