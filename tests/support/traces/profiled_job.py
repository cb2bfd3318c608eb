"""Traces as PyTorch's profiler writes them of data-parallel ranks with GPUs, one of which may be slow."""

import dataclasses
from typing import Any

import numpy as np

Event = dict[str, Any]
MAIN, AUTOGRAD, STREAM = 100, 101, 7
LAG_US = 5000.0
"""Microseconds by which the device lags its host."""


@dataclasses.dataclass
class ProfiledJob:
    """Ranks that run two microbatches in each step, reduce their gradients together, and update their weights."""

    replicas: int = 4
    steps: int = 40
    slow_rank: int = 2
    slow_from: int = 20
    _launches: int = 0

    def documents(self) -> dict[str, dict[str, Any]]:
        """Return the content of each rank's file by its name."""
        draw = np.random.default_rng(5)
        events: list[list[Event]] = [[] for _ in range(self.replicas)]
        begin = 1000.0
        for step in range(self.steps):
            passes = [self._passes(rank, step, begin, draw) for rank in range(self.replicas)]
            ready = [_end(kernels) for kernels in passes]
            reduced = max(ready) + 300
            for of_rank, kernels, at in zip(events, passes, ready, strict=True):
                of_rank.extend(event for kernel in kernels for event in self._launched(*kernel))
                of_rank.extend(self._end_of_step(step, (begin, at, reduced)))
            begin = reduced + 1200
        return {f"trace-{rank}.json": self._document(rank, found) for rank, found in enumerate(events)}

    def _passes(
        self, rank: int, step: int, begin: float, draw: np.random.Generator
    ) -> list[tuple[str, float, float, int]]:
        """Return name, start, length and launching thread of the kernels of two microbatches."""
        slowness = 1.5 if rank == self.slow_rank and step >= self.slow_from else 1.0
        kernels: list[tuple[str, float, float, int]] = []
        for name, usual, thread in 2 * [("forward", 4000.0, MAIN), ("backward", 8000.0, AUTOGRAD)]:
            for number in range(3):
                at = _end(kernels) if kernels else begin
                kernels.append((name, at, usual / 3 * slowness * draw.normal(1, 0.005), thread))
                if (name, number) == ("backward", 1):
                    kernels.append(("memset", _end(kernels), 20.0, MAIN))
        return kernels

    def _launched(self, name: str, at: float, length: float, thread: int, more: Event | None = None) -> list[Event]:
        """Return a kernel and the call that launched it, within an operator of the autograd engine on its thread."""
        self._launches += 1
        number = {"correlation": self._launches}
        kernel = _span("kernel", name, at + LAG_US, length, STREAM) | {"args": number | (more or {})}
        call = _span("cuda_runtime", "cudaLaunchKernel", at, 3.0, thread) | {"args": number}
        operator = _span("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at - 1, 5.0, thread)
        return [kernel, call, *[operator] * (thread == AUTOGRAD)]

    def _end_of_step(self, step: int, times: tuple[float, float, float]) -> list[Event]:
        """Return the reduction, which begins on each rank when it is ready and ends on all at once, and the update."""
        begin, ready, reduced = times
        arguments = {
            "Collective name": "allreduce",
            "In msg nelems": 1 << 20,
            "dtype": "Float",
            "Process Group Name": "0",
            "Process Group Ranks": str(list(range(self.replicas))),
        }
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        return [
            *self._launched(name, ready, reduced - ready, AUTOGRAD, arguments),
            *self._launched("adam", reduced + 2, 1000.0, MAIN),
            _span("user_annotation", "Optimizer.step#Adam.step", reduced, 50.0, MAIN),
            _span("user_annotation", f"ProfilerStep#{step}", begin - 5, reduced + 90 - begin, MAIN),
        ]

    def _document(self, rank: int, events: list[Event]) -> dict[str, Any]:
        ranks = list(range(self.replicas))
        group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": self.replicas, "ranks": ranks}
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
            "distributedInfo": {
                "backend": "nccl",
                "rank": rank,
                "world_size": self.replicas,
                "pg_count": 1,
                "pg_config": [group],
            },
            "baseTimeNanoseconds": 1_790_000_000_000_000_000,
            "traceEvents": events,
        }


def _span(category: str, name: str, at: float, length: float, thread: int) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": at, "dur": length, "args": {}}


def _end(kernels: list[tuple[str, float, float, int]]) -> float:
    _, start, length, _ = kernels[-1]
    return start + length + 2
