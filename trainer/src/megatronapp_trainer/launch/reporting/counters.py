"""Counters of host and devices, written once a second to the worker's ring."""

import json
import logging
import os
import pathlib
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatronapp_common.trace import NO_MICROBATCH, Counter, RecordKind
from megatronapp_native import RingError, RingWriter, monotonic_ns
from megatronapp_trainer.launch.preflight.gpu_counters import DeviceReader

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
CAPACITY = 16384
CLOCK_PAIR_EVERY = 10
US_PER_S = 1e6
NS_PER_S = 1e9
JOIN_S = 1.0
PROC = pathlib.Path("/proc")
CGROUP = pathlib.Path("/sys/fs/cgroup")
STEAL_COLUMN = 7
ACCOUNTED_COLUMNS = 8
"""Columns of the line `cpu` of /proc/stat that add up to the processor time: those after it are part of others."""

Sample = tuple[Counter, int, float]
"""Counter, local rank or device, and value."""


def pressure_total_us(text: str) -> int:
    """Return the microseconds in which some task waited, from the text of a PSI file.

    Raises ValueError without the line `some`.
    """
    for line in text.splitlines():
        if line.startswith("some "):
            return int(line.rpartition("total=")[2])
    raise ValueError("no line 'some' in a PSI file")


def float_bits(value: float) -> int:
    """Return the bits of a 32-bit float, as `aux` stores them."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


class PressureReader:
    """Fraction of the last interval in which some task of the node waited for a processor."""

    def __init__(self, proc: pathlib.Path = PROC) -> None:
        self._path = proc / "pressure" / "cpu"
        self._last: tuple[int, int] | None = None

    def read(self, now_ns: int) -> float | None:
        """Read the fraction; None at the first call and if the kernel has no PSI."""
        try:
            total_us = pressure_total_us(self._path.read_text())
        except (OSError, ValueError):
            return None
        last, self._last = self._last, (now_ns, total_us)
        if last is None or now_ns <= last[0]:
            return None
        return min(1.0, (total_us - last[1]) / US_PER_S / ((now_ns - last[0]) / NS_PER_S))


def processor_ticks(text: str) -> tuple[int, int]:
    """Return the stolen and all ticks of the node's processors, from the text of /proc/stat.

    Raises ValueError without a whole line `cpu`.
    """
    for line in text.splitlines():
        if line.startswith("cpu "):
            ticks = [int(column) for column in line.split()[1 : 1 + ACCOUNTED_COLUMNS]]
            if len(ticks) == ACCOUNTED_COLUMNS:
                return ticks[STEAL_COLUMN], sum(ticks)
    raise ValueError("no whole line 'cpu' in the kernel's statistics")


class StealReader:
    """Share of the node's processor time that the host of its virtual machine gave to others."""

    def __init__(self, proc: pathlib.Path = PROC) -> None:
        self._path = proc / "stat"
        self._last: tuple[int, int] | None = None

    def read(self) -> float | None:
        """Read the share since the last call; None at the first one, and if the kernel does not say."""
        try:
            stolen, total = processor_ticks(self._path.read_text())
        except (OSError, ValueError):
            return None
        last, self._last = self._last, (stolen, total)
        if last is None or total <= last[1]:
            return None
        return min(max(stolen - last[0], 0) / (total - last[1]), 1.0)


def throttled_us(text: str) -> int:
    """Return the microseconds in which a limit stopped a control group, from the text of its cpu.stat.

    Raises ValueError for a group without a limit.
    """
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "throttled_usec":
            return int(value)
    raise ValueError("no line 'throttled_usec' in cpu.stat")


class ThrottleReader:
    """Seconds per second in which the limit of this control group stopped its threads."""

    def __init__(self, cgroup: pathlib.Path = CGROUP) -> None:
        self._path = cgroup / "cpu.stat"
        self._last: tuple[int, int] | None = None

    def read(self, now_ns: int) -> float | None:
        """Read the rate; None at the first call, and if the group has no limit."""
        try:
            total_us = throttled_us(self._path.read_text())
        except (OSError, ValueError):
            return None
        last, self._last = self._last, (now_ns, total_us)
        if last is None or now_ns <= last[0]:
            return None
        return (total_us - last[1]) / US_PER_S / ((now_ns - last[0]) / NS_PER_S)


class RunQueueReader:
    """Seconds per second that the threads of a process waited for a processor."""

    def __init__(self, pid: int, proc: pathlib.Path = PROC) -> None:
        self._tasks = proc / str(pid) / "task"
        self._waits_ns: dict[str, int] = {}
        self._last_ns: int | None = None

    def read(self, now_ns: int) -> float | None:
        """Read the rate; None at the first call, and if the process has ended or the kernel has no schedstat."""
        waits_ns = self._read_waits()
        if not waits_ns:
            return None
        grown_ns = sum(wait - self._waits_ns.get(thread, 0) for thread, wait in waits_ns.items())
        last_ns, self._last_ns, self._waits_ns = self._last_ns, now_ns, waits_ns
        return None if last_ns is None or now_ns <= last_ns else grown_ns / (now_ns - last_ns)

    def _read_waits(self) -> dict[str, int]:
        waits_ns = {}
        try:
            threads = os.listdir(self._tasks)
        except OSError:  # the process has ended
            return {}
        for thread in threads:
            try:
                waits_ns[thread] = int((self._tasks / thread / "schedstat").read_text().split()[1])
            except (OSError, IndexError):  # the thread has ended meanwhile
                continue
        return waits_ns


class CounterSampler:
    """All counters of a worker; `pids` gives the process of each local rank."""

    def __init__(self, pids: Callable[[], Mapping[int, int]], devices: DeviceReader) -> None:
        self._pids = pids
        self._devices = devices
        self._pressure = PressureReader()
        self._steal = StealReader()
        self._throttle = ThrottleReader()
        self._run_queues: dict[int, RunQueueReader] = {}

    def sample(self, now_ns: int) -> Iterator[Sample]:
        """Yield the counters that can be read now."""
        node = {
            Counter.CPU_PRESSURE: self._pressure.read(now_ns),
            Counter.CPU_STEAL: self._steal.read(),
            Counter.CPU_THROTTLED: self._throttle.read(now_ns),
        }
        for counter, value in node.items():
            if value is not None:
                yield counter, 0, value
        for local_rank, pid in self._pids().items():
            delay = self._run_queues.setdefault(pid, RunQueueReader(pid)).read(now_ns)
            if delay is not None:
                yield Counter.RANK_RUN_QUEUE, local_rank, delay
        yield from self._devices.sample()


class CounterThread:
    """Samples in a separate thread, because a driver may be slow to answer. Does nothing without a ring."""

    def __init__(
        self, path: pathlib.Path, *, attempt: int, metadata: Mapping[str, Any], sampler: CounterSampler
    ) -> None:
        self._sampler = sampler
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counters", daemon=True)
        self._writer: RingWriter | None = None
        try:
            self._writer = RingWriter(str(path), CAPACITY, attempt, json.dumps(metadata).encode())
        except RingError as error:
            log.warning("no counters of host and devices: %s", error)

    def __enter__(self) -> "CounterThread":
        """Start the sampling thread."""
        if self._writer is not None:
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop the thread, and mark the ring as closed."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        writer = self._writer
        assert writer is not None
        rounds = 0
        while True:
            now_ns = monotonic_ns()
            for counter, ordinal, value in self._sampler.sample(now_ns):
                aux = float_bits(value)
                writer.record(now_ns, 0, 0, ordinal, aux, counter, NO_MICROBATCH, RecordKind.COUNTER, 0, 0, 0)
            writer.heartbeat()
            rounds += 1
            if rounds % CLOCK_PAIR_EVERY == 0:
                writer.clock_pair()
            if self._stop.wait(INTERVAL_S):
                break
        writer.close(False)
