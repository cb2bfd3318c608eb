"""Transfers of NCCL with the times at which their kernels ran, from the profiler plugin of `megatronapp_native`.

NCCL loads the plugin (`NCCL_PROFILER_PLUGIN`) when its first communicator is made, and calls it for every operation
and for every channel of a kernel. No event is recorded on any stream. The plugin logs; the training thread takes the
log at the boundaries of steps.
"""

import ctypes
import logging
import os
import pathlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatronapp_common.trace import BYTES_UNIT, NO_COMM, NO_MICROBATCH, Flag, NcclOperation, RecordKind
from megatronapp_native import _native
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.scan.recorder import TraceRing

log = logging.getLogger(__name__)

TRANSFER = np.dtype(
    [
        ("communicator", "<u8"),
        ("bytes", "<u8"),
        ("device_start_ns", "<u8"),
        ("device_end_ns", "<u8"),
        ("seen_ns", "<u8"),
        ("sequence", "<u4"),
        ("operation", "<u4"),
        ("peer", "<i4"),
        ("ranks", "<i4"),
        ("rank", "<i4"),
        ("channels", "<u4"),
    ]
)
"""`megatronapp::nccl::Transfer` of csrc."""
VARIABLE = "NCCL_PROFILER_PLUGIN"
MOST_AT_ONCE = 4096
FIRST_TRANSFER_S = 30.0
FINISH_S = 2.0
"""Time for reports of NCCL that are missing at the end; NCCL before 2.31 loses some."""
POLL_S = 0.001
GROUPS = ("tp", "dp", "mp", "embed", "pp")
"""Kinds of groups whose communicators are identified."""
PROBE_ELEMENTS = {kind: 12_347 + place for place, kind in enumerate(GROUPS)}
"""Size of the reduction that identifies the communicator of a group; no other transfer before training has it."""
MOST_STEPS = 1024
CLOCK_WINDOW_NS = 2_000_000_000
"""Time over which the smallest delay between an end on the device and its sighting on the host is taken: clocks that
differ by 20e-6 part by 40 us in it.
"""
Transfers = NDArray[np.void]
SlotOf = Callable[[int, int], int]
"""Function from an operation and its peer in the communicator to the slot in the ring's table, or NO_COMM."""


class TransferLog(Protocol):
    """Source of finished transfers."""

    def take(self) -> Transfers:
        """Return the transfers that have finished since the last call, oldest first."""

    def dropped(self) -> int:
        """Return how many were dropped so far."""

    def in_flight(self) -> int:
        """Return how many were enqueued and have not finished."""


def plugin_path() -> pathlib.Path:
    """Return the path of the plugin, which is installed with `megatronapp_native`."""
    return pathlib.Path(_native.__file__).with_name("libmegatronapp_nccl_profiler.so")


def choose_plugin(*, is_cuda: bool) -> None:
    """Make NCCL load the plugin. Call before its first communicator.

    Raises UsageError without GPUs, whose transfers are not NCCL's, and for another plugin.
    """
    if not is_cuda:
        raise UsageError("--trace-nccl: these ranks run on processors and use no NCCL; remove the flag")
    path = str(plugin_path())
    if os.environ.setdefault(VARIABLE, path) != path:
        raise UsageError(
            f"--trace-nccl: {VARIABLE} is set to {os.environ[VARIABLE]!r}, and NCCL loads one plugin; "
            "unset the variable, or remove the flag"
        )


class PluginLog:
    """Log of the plugin in this process."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(plugin_path()))
        self._take = library.megatronapp_nccl_take
        self._take.argtypes, self._take.restype = [ctypes.c_void_p, ctypes.c_uint64], ctypes.c_uint64
        self._dropped = library.megatronapp_nccl_dropped
        self._dropped.restype = ctypes.c_uint64
        self._in_flight = library.megatronapp_nccl_in_flight
        self._in_flight.restype = ctypes.c_uint64
        self._communicator = library.megatronapp_nccl_communicator
        self._communicator.argtypes = [ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64)]
        self._communicator.restype = ctypes.c_bool
        self._buffer = np.zeros(MOST_AT_ONCE, TRANSFER)

    def dropped(self) -> int:
        """Return how many transfers were dropped so far.

        Too many were pending, or none took them, or NCCL has not reported when their kernels ran.
        """
        return int(self._dropped())

    def in_flight(self) -> int:
        """Return how many transfers were enqueued and have not finished."""
        return int(self._in_flight())

    def communicator(self, num_bytes: int) -> int | None:
        """Return the communicator of the newest transfer of this size; None if none was enqueued lately."""
        found = ctypes.c_uint64()
        return found.value if self._communicator(num_bytes, ctypes.byref(found)) else None

    def take(self) -> Transfers:
        """Return the transfers that have finished since the last call, oldest first."""
        parts = []
        while True:
            count = self._take(self._buffer.ctypes.data, MOST_AT_ONCE)
            parts.append(self._buffer[:count].copy())
            if count < MOST_AT_ONCE:
                return np.concatenate(parts)


def communicator_of(log: PluginLog, num_bytes: int) -> int:
    """Return the communicator in which a transfer of this size was enqueued, waiting until it is.

    The times of its kernel are not needed, which NCCL reports late or never. Raises UsageError if no transfer is
    enqueued: NCCL has not loaded the plugin.
    """
    deadline_s = time.monotonic() + FIRST_TRANSFER_S
    while (found := log.communicator(num_bytes)) is None:
        if time.monotonic() >= deadline_s:
            raise UsageError(
                "--trace-nccl: NCCL has reported no transfer to the profiler plugin; it needs NCCL 2.27 or later, and "
                "the reason is in its log with NCCL_DEBUG=INFO; remove the flag to train without it"
            )
        time.sleep(POLL_S)
    return found


class NcclTransfers:
    """Records of the transfers of this rank, written at the boundaries of steps.

    A transfer belongs to the step in which its kernel began; those before the first step are not recorded. Times of
    the device are shifted by the smallest delay with which the host has seen an end lately: they are late by that much.
    """

    def __init__(self, ring: TraceRing, log: TransferLog, slots: Mapping[int, SlotOf]) -> None:
        """Write to `ring` what `log` has; `slots` are by the hash of a communicator."""
        self._ring = ring
        self._log = log
        self._slots = slots
        self._delays_ns: deque[tuple[int, int]] = deque()
        """Time of sighting and smallest delay of each drain in the window."""
        self._dropped = 0
        self._steps: deque[tuple[int, int]] = deque(maxlen=MOST_STEPS)
        """Begin, in ns, and number of the newest steps."""

    def begin_step(self, step: int, now_ns: int) -> None:
        """Write the transfers that have finished, and note when a step begins."""
        self.drain()
        self._steps.append((now_ns, step))

    def finish(self, timeout_s: float = FINISH_S) -> None:
        """Write the transfers that were enqueued, at the end of the run, waiting for reports of NCCL."""
        deadline_s = time.monotonic() + timeout_s
        while self._log.in_flight() and time.monotonic() < deadline_s:
            self.drain()
            time.sleep(POLL_S)
        self.drain()

    def drain(self) -> None:
        """Write the transfers that have finished."""
        found = self._log.take()
        if (dropped := self._log.dropped()) > self._dropped:
            log.warning("no times are known of %d transfers of NCCL", dropped - self._dropped)
            self._dropped = dropped
        if not len(found) or not self._steps:
            return
        seen_ns = found["seen_ns"].astype(np.int64)
        delay_ns = int((seen_ns - found["device_end_ns"].astype(np.int64)).min())
        self._delays_ns.append((int(seen_ns.max()), delay_ns))
        while self._delays_ns[0][0] < self._delays_ns[-1][0] - CLOCK_WINDOW_NS:
            self._delays_ns.popleft()
        shift_ns = min(delay for _, delay in self._delays_ns)
        for transfer in found:
            self._write(transfer, max(int(transfer["device_start_ns"]) + shift_ns, 0))

    def _write(self, transfer: np.void, start_ns: int) -> None:
        step = next((number for begun_ns, number in reversed(self._steps) if begun_ns <= start_ns), None)
        if step is None:
            return
        operation, peer = int(transfer["operation"]), int(transfer["peer"])
        slot_of = self._slots.get(int(transfer["communicator"]))
        self._ring.record(
            start_ns,
            int(transfer["device_end_ns"]) - int(transfer["device_start_ns"]),
            step,
            int(transfer["sequence"]),
            int(transfer["bytes"]) // BYTES_UNIT,
            NO_COMM if slot_of is None else slot_of(operation, peer),
            NO_MICROBATCH,
            RecordKind.NCCL,
            0,
            operation,
            Flag.AUX_BYTES | Flag.DEVICE_CLOCK,
        )


def slots_of_group(
    slot: int | None, pair_slots: Mapping[tuple[int, int], int], members: Sequence[int], rank: int
) -> SlotOf:
    """Return the slot of (operation, peer in the group) for a group with these members, seen from `rank`.

    A send or receive has the slot of its directed pair, a collective that of the group; NO_COMM for one that the table
    lacks.
    """

    def slot_of(operation: int, peer: int) -> int:
        if operation in {NcclOperation.SEND, NcclOperation.RECEIVE} and 0 <= peer < len(members):
            pair = (rank, members[peer]) if operation == NcclOperation.SEND else (members[peer], rank)
            return pair_slots.get(pair, NO_COMM)
        return NO_COMM if slot is None else slot

    return slot_of
