"""Transfers of NCCL: the log of the real plugin, called as NCCL calls it, becomes records of a real ring."""

import ctypes
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import megatronapp_native as native
from megatronapp_common.trace import NO_COMM, RECORD, Flag, NcclOperation, RecordKind
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.scan.nccl_transfers import (
    TRANSFER,
    VARIABLE,
    NcclTransfers,
    PluginLog,
    Transfers,
    choose_plugin,
    communicator_of,
    plugin_path,
    slots_of_group,
)

COLLECTIVE, POINT_TO_POINT, KERNEL_CHANNEL, CHANNEL_STOP = 2, 4, 64, 22
HOUR_NS = 3_600_000_000_000


class Collective(ctypes.Structure):
    _fields_ = (
        ("sequence", ctypes.c_uint64),
        ("function", ctypes.c_char_p),
        ("send", ctypes.c_void_p),
        ("receive", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("root", ctypes.c_int),
        ("datatype", ctypes.c_char_p),
        ("channels", ctypes.c_uint8),
        ("warps", ctypes.c_uint8),
        ("algorithm", ctypes.c_char_p),
        ("protocol", ctypes.c_char_p),
    )


class PointToPoint(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char_p),
        ("buffer", ctypes.c_void_p),
        ("datatype", ctypes.c_char_p),
        ("count", ctypes.c_size_t),
        ("peer", ctypes.c_int),
        ("channels", ctypes.c_uint8),
    )


class KernelChannel(ctypes.Structure):
    _fields_ = (("channel", ctypes.c_uint8), ("timer_ns", ctypes.c_uint64))


class Details(ctypes.Union):
    _fields_ = (("collective", Collective), ("transfer", PointToPoint), ("channel", KernelChannel))


class Event(ctypes.Structure):
    _anonymous_ = ("details",)
    _fields_ = (
        ("type", ctypes.c_uint8),
        ("parent", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("details", Details),
    )


Result, Pointer = ctypes.c_int, ctypes.c_void_p


class Profiler(ctypes.Structure):
    """The table of functions that NCCL finds in a plugin of version 4."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        (
            "init",
            ctypes.CFUNCTYPE(
                Result,
                ctypes.POINTER(Pointer),
                ctypes.POINTER(ctypes.c_int),
                ctypes.c_char_p,
                ctypes.c_uint64,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_int,
                Pointer,
            ),
        ),
        ("start_event", ctypes.CFUNCTYPE(Result, Pointer, ctypes.POINTER(Pointer), ctypes.POINTER(Event))),
        ("stop_event", ctypes.CFUNCTYPE(Result, Pointer)),
        ("record_state", ctypes.CFUNCTYPE(Result, Pointer, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))),
        ("finalize", ctypes.CFUNCTYPE(Result, Pointer)),
    )


class FakeNccl:
    """A communicator that makes the calls that NCCL makes."""

    def __init__(self, hash_: int, ranks: int) -> None:
        self.profiler = Profiler.in_dll(ctypes.CDLL(str(plugin_path())), "ncclProfiler_v4")
        self.context = Pointer()
        types = ctypes.c_int()
        self.profiler.init(ctypes.byref(self.context), ctypes.byref(types), None, hash_, 1, ranks, 0, None)
        assert types.value == COLLECTIVE | POINT_TO_POINT | KERNEL_CHANNEL

    def enqueue(self, event: Event) -> ctypes.c_void_p:
        """Enqueue an operation of one channel."""
        operation = Pointer()
        self.profiler.start_event(self.context, ctypes.byref(operation), ctypes.byref(event))
        self.profiler.stop_event(operation)
        return operation

    def report(self, operation: ctypes.c_void_p, start_ns: int, end_ns: int) -> None:
        """Report that the kernel of an operation has run at these times of the device."""
        channel = Pointer()
        begun = Event(type=KERNEL_CHANNEL, parent=operation, channel=KernelChannel(timer_ns=start_ns))
        self.profiler.start_event(self.context, ctypes.byref(channel), ctypes.byref(begun))
        self.profiler.record_state(channel, CHANNEL_STOP, ctypes.byref(ctypes.c_uint64(end_ns)))
        self.profiler.stop_event(channel)

    def run(self, event: Event, start_ns: int, end_ns: int) -> None:
        """Enqueue an operation, and report that its kernel has run."""
        self.report(self.enqueue(event), start_ns, end_ns)


class LateLog(PluginLog):
    """Log whose reader is always earlier than the report of a kernel."""

    def __init__(self, report: Callable[[], None]) -> None:
        super().__init__()
        self.reports = [report]

    def take(self) -> Transfers:
        found = super().take()
        while self.reports:
            self.reports.pop()()
        return found


def records_of(reader: native.RingReader) -> Any:
    body, lost = reader.read(1024)
    assert lost == 0
    return np.frombuffer(body, RECORD)


def all_reduce(count: int) -> Event:
    collective = Collective(function=b"AllReduce", count=count, datatype=b"ncclFloat32", channels=1)
    return Event(type=COLLECTIVE, collective=collective)


def send(peer: int) -> Event:
    transfer = PointToPoint(function=b"Send", datatype=b"ncclBfloat16", count=64, peer=peer)
    return Event(type=POINT_TO_POINT, transfer=transfer)


def test_transfers_become_records_of_the_steps_in_which_they_began(tmp_path: pathlib.Path) -> None:
    ring = native.RingWriter(str(tmp_path / "ring"), 1024, 0, b"{}")
    log = PluginLog()
    known, other = FakeNccl(7, 2), FakeNccl(8, 2)
    before = known.enqueue(all_reduce(100))
    assert communicator_of(log, 400) == 7  # whether or not its kernel has run
    known.report(before, 1, 2)  # before the first step, and never written
    transfers = NcclTransfers(ring, log, {7: slots_of_group(5, {(0, 4): 3}, [0, 4], 0)})
    now_ns = native.monotonic_ns()
    transfers.begin_step(10, now_ns - 2 * HOUR_NS)
    transfers.begin_step(11, now_ns - HOUR_NS)
    device_ns = 50 * HOUR_NS  # a clock of its own
    begun_ns = device_ns - HOUR_NS - HOUR_NS // 2  # in step 10
    known.run(all_reduce(256), begun_ns, begun_ns + 100_000_000)
    known.run(send(1), device_ns - 500_000_000, device_ns)
    other.run(all_reduce(4), device_ns - 100_000, device_ns)
    bodies: list[bytes] = []
    reader = native.RingReader(str(tmp_path / "ring"))
    deadline_s = time.monotonic() + 120
    while len(bodies) < 3 and time.monotonic() < deadline_s:  # how many channels sends have is not announced
        transfers.drain()
        body, lost = reader.read(1024)
        assert lost == 0
        bodies += [body[place : place + 32] for place in range(0, len(body), 32)]
    records = np.frombuffer(b"".join(bodies), RECORD)
    assert (records["kind"] == RecordKind.NCCL).all()
    assert (records["flags"] == Flag.AUX_BYTES | Flag.DEVICE_CLOCK).all()
    columns = ("step", "comm", "layer", "ordinal", "aux", "duration")
    assert [tuple(int(record[name]) for name in columns) for record in records] == [
        (10, 5, NcclOperation.ALL_REDUCE, 1, 64, 12_500_000),
        (11, NO_COMM, NcclOperation.ALL_REDUCE, 0, 1, 12_500),
        (11, 3, NcclOperation.SEND, 0, 8, 62_500_000),
    ]
    assert TRANSFER.itemsize == 64


def test_transfers_that_are_reported_late_are_written_at_the_end(tmp_path: pathlib.Path) -> None:
    ring = native.RingWriter(str(tmp_path / "ring"), 1024, 0, b"{}")
    nccl = FakeNccl(9, 2)
    enqueued = nccl.enqueue(send(1))
    now_ns = native.monotonic_ns()
    transfers = NcclTransfers(ring, LateLog(lambda: nccl.report(enqueued, now_ns - 800, now_ns)), {})
    transfers.begin_step(1, now_ns - HOUR_NS)
    reader = native.RingReader(str(tmp_path / "ring"))
    assert len(records_of(reader)) == 0
    transfers.finish(timeout_s=120)
    records = records_of(reader)
    assert records["layer"].tolist() == [NcclOperation.SEND]
    assert records["duration"].tolist() == [100]


def test_the_end_does_not_wait_long_for_a_lost_report(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    ring = native.RingWriter(str(tmp_path / "ring"), 1024, 0, b"{}")
    nccl = FakeNccl(10, 2)
    missed = nccl.enqueue(send(1))
    transfers = NcclTransfers(ring, log := PluginLog(), {})
    transfers.begin_step(1, native.monotonic_ns() - HOUR_NS)
    transfers.finish(timeout_s=0.01)
    assert log.in_flight() == 1
    nccl.report(missed, 2, 1)  # times that were overwritten
    transfers.finish(timeout_s=120)
    assert log.in_flight() == 0
    assert "no times are known of 1 transfers of NCCL" in caplog.text
    assert len(records_of(native.RingReader(str(tmp_path / "ring")))) == 0


def test_another_plugin_and_ranks_without_nccl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="use no NCCL"):
        choose_plugin(is_cuda=False)
    monkeypatch.setenv(VARIABLE, "/other.so")
    with pytest.raises(UsageError, match="NCCL loads one plugin"):
        choose_plugin(is_cuda=True)
    monkeypatch.delenv(VARIABLE)
    choose_plugin(is_cuda=True)
    assert os.environ[VARIABLE] == str(plugin_path())
