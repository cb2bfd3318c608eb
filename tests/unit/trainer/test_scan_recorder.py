"""Recorders: what a mark and a span become in a real ring; the device's clock against a device of known times."""

import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatronapp_native as native
from megatronapp_common.trace import RECORD, Flag, Metric, RecordKind
from megatronapp_trainer.scan.device import DeviceClock, DeviceRecorder
from megatronapp_trainer.scan.recorder import Recorder, RecordKey, float_bits


class FakeRingClock:
    """Host clock that the test sets, with its run-queue delay."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.waited_ns = 0
        self.ticks_ns = 0
        self.processor_ns = 0

    def read_ns(self) -> int:
        """Return the time; it advances by itself where the test sets `ticks_ns`."""
        self.now_ns += self.ticks_ns
        return self.now_ns


class Device:
    """Stream that runs `lag_ns` after its host and whose events pass when the test says; `drift` is the speed of its
    clock."""

    def __init__(self, clock: FakeRingClock) -> None:
        self.clock = clock
        self.done_ns = 1 << 62
        self.drift = 1.0
        self.lag_ns = 0

    def event(self) -> "DeviceEvent":
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ns = -1

    def record(self) -> None:
        self.at_ns = self.device.clock.now_ns + self.device.lag_ns

    def query(self) -> bool:
        return self.at_ns <= min(self.device.done_ns, self.device.clock.now_ns)

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, end: "DeviceEvent") -> float:
        return float(np.float32((end.at_ns - self.at_ns) * self.device.drift / 1e6))


@pytest.fixture
def clock() -> FakeRingClock:
    return FakeRingClock()


@pytest.fixture
def ring_path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "rank0.ring"


def ring(path: pathlib.Path) -> native.RingWriter:
    return native.RingWriter(str(path), 256, 0, b"{}")


def records(path: pathlib.Path) -> np.ndarray:
    data, lost = native.RingReader(str(path)).read(1000)
    assert lost == 0
    return np.frombuffer(data, RECORD)


def host_recorder(path: pathlib.Path, clock: FakeRingClock, kinds: list[tuple[RecordKind, int]]) -> Recorder:
    return Recorder(
        ring(path),
        monotonic_ns=clock.read_ns,
        run_queue_ns=lambda: clock.waited_ns,
        on_length=lambda fields, own_ns: kinds.append((fields.kind, own_ns)),
        processor_ns=lambda: clock.processor_ns,
    )


def test_a_compute_span_carries_its_key_and_its_run_queue_delay(ring_path: pathlib.Path, clock: FakeRingClock) -> None:
    kinds: list[tuple[RecordKind, int]] = []
    recorder = host_recorder(ring_path, clock, kinds)
    recorder.begin_step(7)
    fields = RecordKey(RecordKind.FORWARD, microbatch=3, chunk=1)
    mark = recorder.enter(fields)
    clock.now_ns += 8_000
    clock.waited_ns += 1_600
    clock.processor_ns += 4_000
    recorder.leave(fields, mark)
    (record,) = records(ring_path)
    assert (record["step"], record["kind"], record["microbatch"], record["chunk"]) == (7, RecordKind.FORWARD, 3, 1)
    assert (record["start_ns"], record["duration"] * 8, record["aux"] * 8) == (1_000_000_000, 8_000, 1_600)
    assert record["flags"] == Flag.AUX_RUN_QUEUE
    assert record["ordinal"] * 8 == 2_400  # neither running nor waiting for a processor
    assert kinds == [(RecordKind.FORWARD, 6_400)]


def test_an_open_span_is_seen_while_it_lasts(ring_path: pathlib.Path, clock: FakeRingClock) -> None:
    recorder = host_recorder(ring_path, clock, [])
    recorder.begin_step(4)
    fields = RecordKey(RecordKind.RECV_WAIT)
    mark = recorder.enter(fields)
    seen = native.RingReader(str(ring_path)).info().open_span
    assert seen is not None
    assert (seen.kind, seen.step) == (RecordKind.RECV_WAIT, 4)
    recorder.leave(fields, mark)
    assert native.RingReader(str(ring_path)).info().open_span is None


def test_a_transfer_carries_its_size(ring_path: pathlib.Path, clock: FakeRingClock) -> None:
    recorder = host_recorder(ring_path, clock, [])
    recorder.transfer(RecordKey(RecordKind.SEND_POST, comm=2, ordinal=5), recorder.host_mark(), 4096)
    (record,) = records(ring_path)
    assert (record["comm"], record["ordinal"], record["aux"] * 16) == (2, 5, 4096)
    assert record["flags"] == Flag.AUX_BYTES


@given(value=st.floats(width=32))
def test_a_metric_keeps_its_bits(value: float) -> None:
    assert np.uint32(float_bits(value)).view(np.float32).tobytes() == np.float32(value).tobytes()


def test_a_metric_beyond_32_bits_becomes_infinite() -> None:
    assert np.uint32(float_bits(-1e300)).view(np.float32) == -np.inf


def test_a_metric_is_a_record_of_its_step(ring_path: pathlib.Path, clock: FakeRingClock) -> None:
    recorder = host_recorder(ring_path, clock, [])
    recorder.begin_step(9)
    recorder.metric(Metric.LOSS, 2.5)
    (record,) = records(ring_path)
    assert (record["kind"], record["comm"], record["step"]) == (RecordKind.METRIC, Metric.LOSS, 9)
    assert record["aux"].view(np.float32) == 2.5


def device_recorder(path: pathlib.Path, clock: FakeRingClock, device: Device) -> DeviceRecorder:
    return DeviceRecorder(
        ring(path),
        monotonic_ns=clock.read_ns,
        run_queue_ns=lambda: 0,
        on_length=lambda fields, own_ns: None,
        new_event=device.event,
    )


def device_step(recorder: DeviceRecorder, clock: FakeRingClock, step: int, *, length_ns: int = 8_000) -> None:
    recorder.begin_step(step)
    fields = RecordKey(RecordKind.BACKWARD, microbatch=0)
    mark = recorder.enter(fields)
    clock.now_ns += length_ns
    recorder.leave(fields, mark)


def test_device_spans_are_written_when_the_device_is_done_and_not_before(
    ring_path: pathlib.Path, clock: FakeRingClock
) -> None:
    device = Device(clock)
    recorder = device_recorder(ring_path, clock, device)
    device.done_ns = clock.now_ns - 1
    device_step(recorder, clock, 0)
    recorder.begin_step(1)
    assert len(records(ring_path)) == 0
    device.done_ns = clock.now_ns
    recorder.begin_step(2)
    (record,) = records(ring_path)
    assert (record["step"], record["duration"] * 8, record["flags"]) == (0, 8_000, Flag.DEVICE_CLOCK | Flag.AUX_LEAD)
    assert record["start_ns"] == 1_000_000_000


@pytest.mark.parametrize("lag_ns", [0, 400, 4_000_000])
def test_a_device_span_carries_how_far_its_host_was_ahead(
    ring_path: pathlib.Path, clock: FakeRingClock, lag_ns: int
) -> None:
    device = Device(clock)
    recorder = device_recorder(ring_path, clock, device)
    device.lag_ns = lag_ns
    device_step(recorder, clock, 0)
    clock.now_ns += lag_ns  # by then the device is done, too
    recorder.finish()
    (record,) = records(ring_path)
    assert record["start_ns"] == 1_000_000_000 + lag_ns
    assert record["aux"] * 8 == lag_ns


def test_the_device_clock_follows_drift(clock: FakeRingClock) -> None:
    device = Device(clock)
    device.drift = 1.0001
    watch = DeviceClock(device.event, lambda: clock.now_ns)
    for _ in range(1000):
        clock.now_ns += 500_000_000
        anchor = device.event()
        anchor.record()
        watch.advance(anchor, clock.now_ns, clock.now_ns + 20_000)
        assert abs(watch.host_ns(anchor) - clock.now_ns) <= 20_000


@pytest.mark.parametrize("drift", [1.00001, 0.99999])
def test_leads_stay_right_however_long_a_run_lasts(ring_path: pathlib.Path, clock: FakeRingClock, drift: float) -> None:
    """Let the device end each span just after its host, with a clock that is wrong by 10 us a second."""
    device = Device(clock)
    device.drift = drift
    recorder = device_recorder(ring_path, clock, device)
    for step in range(200):
        device_step(recorder, clock, step, length_ns=400_000_000)
        clock.now_ns += 100_000_000
    recorder.finish()
    assert max(record["aux"] * 8 for record in records(ring_path)) < 50_000


def test_finish_writes_what_is_pending(ring_path: pathlib.Path, clock: FakeRingClock) -> None:
    recorder = device_recorder(ring_path, clock, Device(clock))
    device_step(recorder, clock, 0)
    recorder.finish()
    assert len(records(ring_path)) == 1


def test_a_post_on_a_device_records_when_the_stream_reached_it(ring_path: pathlib.Path, clock: FakeRingClock) -> None:
    recorder = device_recorder(ring_path, clock, Device(clock))
    recorder.begin_step(0)
    mark = recorder.host_mark()
    clock.now_ns += 5_000
    recorder.transfer(RecordKey(RecordKind.SEND_POST, comm=1, ordinal=2), mark, 4096)
    recorder.finish()
    (record,) = records(ring_path)
    assert (record["start_ns"], record["duration"]) == (1_000_005_000, 0)
    assert (record["aux"] * 16, record["flags"]) == (4096, Flag.AUX_BYTES | Flag.DEVICE_CLOCK)


def test_finish_abandons_a_stuck_stream(ring_path: pathlib.Path, clock: FakeRingClock) -> None:
    device = Device(clock)
    recorder = device_recorder(ring_path, clock, device)
    device.done_ns = clock.now_ns - 1
    device_step(recorder, clock, 0)
    clock.ticks_ns = 200_000_000
    recorder.finish()
    assert len(records(ring_path)) == 0
