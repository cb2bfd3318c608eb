"""Recorders: what a mark and a span become in a real ring; the native recorder with a simulated driver."""

import ctypes
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megatronapp_native as native
from megatronapp_common.trace import RECORD, Flag, Metric, RecordKind
from megatronapp_trainer.scan.device import DeviceRecorder
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
        on_length=lambda kind, flags, own_ns: kinds.append((RecordKind(kind), own_ns)),
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


LONG_NS = 20_000_000
HANG = 2**64 - 1


@pytest.fixture(scope="module")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    source = pathlib.Path(__file__).parents[2] / "support" / "training" / "simulated_cuda.c"
    built = tmp_path_factory.mktemp("cuda") / "libsimulated_cuda.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(built), str(source), "-lpthread"], check=True)
    return str(built)


class SimulatedDevice:
    """A native recorder whose driver is the simulated one, and what the tests order from that."""

    def __init__(self, library_path: str, ring_path: pathlib.Path, *, has_ring: bool = True) -> None:
        self.library = ctypes.CDLL(library_path)
        self.library.simulated_launch.argtypes = [ctypes.c_uint64]
        self.library.simulated_newest_event.restype = ctypes.c_uint64
        self.library.simulated_reset()
        self.lengths: list[tuple[RecordKind, int]] = []
        writer = ring(ring_path)
        self.reader = native.RingReader(str(ring_path))
        self.native = native.DeviceRecorder(writer if has_ring else None, 0, library_path)
        self.recorder = DeviceRecorder(
            writer,
            native=self.native,
            current_stream=lambda: 0,
            monotonic_ns=native.monotonic_ns,
            run_queue_ns=native.run_queue_ns,
            on_length=lambda kind, flags, own_ns: self.lengths.append((RecordKind(kind), own_ns)),
        )

    def launch(self, length_ns: int) -> None:
        self.library.simulated_launch(length_ns)

    def event_ns(self) -> int:
        """Return when the event that was recorded last is passed."""
        return int(self.library.simulated_newest_event())

    def span(self, kind: RecordKind, length_ns: int) -> tuple[int, int]:
        """Record a span with work of this length; return its true start and end."""
        fields = RecordKey(kind, microbatch=3, chunk=1, ordinal=5)
        mark = self.recorder.enter(fields)
        start_ns = self.event_ns()
        self.launch(length_ns)
        self.recorder.leave(fields, mark)
        return start_ns, self.event_ns()


@pytest.fixture
def device(library_path: str, ring_path: pathlib.Path) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(library_path, ring_path)
    yield device
    device.library.simulated_reset()
    device.recorder.finish()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_span_has_the_times_of_the_device_and_the_lead_of_its_host(
    ring_path: pathlib.Path, device: SimulatedDevice
) -> None:
    for number, length_ns in enumerate((LONG_NS, 10 * LONG_NS, 100 * LONG_NS), 1):
        device.recorder.begin_step(4)
        start_ns, end_ns = device.span(RecordKind.BACKWARD, length_ns)
        wait_until(lambda number=number: len(records(ring_path)) == number)  # type: ignore[misc]
        record = records(ring_path)[-1]
        if record["aux"] > 0:  # otherwise the host was stopped for longer than the span
            break
    assert (record["step"], record["kind"], record["microbatch"]) == (4, RecordKind.BACKWARD, 3)
    assert (record["chunk"], record["ordinal"]) == (1, 5)
    assert record["flags"] == Flag.DEVICE_CLOCK | Flag.AUX_LEAD
    error_ns = device.native.uncertainty_ns + 1_000
    assert abs(int(record["start_ns"]) - start_ns) <= error_ns
    assert abs(int(record["start_ns"]) + int(record["duration"]) * 8 - end_ns) <= error_ns
    assert 0 < record["aux"] * 8 <= length_ns + error_ns


def test_lengths_are_reported_at_a_later_step(device: SimulatedDevice) -> None:
    device.recorder.begin_step(0)
    start_ns, end_ns = device.span(RecordKind.GRAD_NORM, 1_000_000)
    assert not device.lengths

    def reported() -> bool:
        device.recorder.begin_step(1)
        return bool(device.lengths)

    wait_until(reported)
    ((kind, length_ns),) = device.lengths
    assert kind == RecordKind.GRAD_NORM
    assert length_ns == pytest.approx(end_ns - start_ns, abs=2 * device.native.uncertainty_ns + 1_000)


def test_a_device_that_hangs_is_seen_inside_its_span_while_its_host_is_in_another(
    ring_path: pathlib.Path, device: SimulatedDevice
) -> None:
    device.recorder.begin_step(7)
    device.span(RecordKind.BACKWARD, HANG)
    fields = RecordKey(RecordKind.GRAD_NORM)
    mark = device.recorder.enter(fields)
    wait_until(lambda: device.reader.info().device_span is not None)
    inside, host = device.reader.info().device_span, device.reader.info().open_span
    assert inside is not None
    assert (inside.kind, inside.step, inside.microbatch) == (RecordKind.BACKWARD, 7, 3)
    assert host is not None
    assert host.kind == RecordKind.GRAD_NORM
    device.recorder.leave(fields, mark)
    assert len(records(ring_path)) == 0


def test_a_post_has_the_time_at_which_the_stream_gets_there(ring_path: pathlib.Path, device: SimulatedDevice) -> None:
    device.recorder.begin_step(0)
    device.launch(LONG_NS)
    device.recorder.transfer(RecordKey(RecordKind.SEND_POST, comm=1, ordinal=2), device.recorder.host_mark(), 4096)
    reached_ns = device.event_ns()
    device.recorder.finish()
    (record,) = records(ring_path)
    assert abs(int(record["start_ns"]) - reached_ns) <= device.native.uncertainty_ns + 1_000
    assert (record["duration"], record["aux"] * 16) == (0, 4096)
    assert record["flags"] == Flag.AUX_BYTES | Flag.DEVICE_CLOCK


def test_records_of_the_host_are_written_too(ring_path: pathlib.Path, device: SimulatedDevice) -> None:
    device.recorder.begin_step(2)
    device.recorder.metric(Metric.LOSS, 2.5)
    device.recorder.finish()
    (record,) = records(ring_path)
    assert (record["kind"], record["step"]) == (RecordKind.METRIC, 2)


def test_without_a_ring_lengths_are_still_reported(library_path: str, ring_path: pathlib.Path) -> None:
    device = SimulatedDevice(library_path, ring_path, has_ring=False)
    device.span(RecordKind.FORWARD, 0)
    device.recorder.finish()
    device.recorder.begin_step(1)
    assert [kind for kind, _ in device.lengths] == [RecordKind.FORWARD]


def test_a_failure_of_the_driver_is_logged_once(device: SimulatedDevice, caplog: pytest.LogCaptureFixture) -> None:
    device.library.simulated_fail(700)
    device.span(RecordKind.FORWARD, 0)
    wait_until(lambda: bool(device.native.failure))
    device.recorder.begin_step(1)
    device.recorder.begin_step(2)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "cuEventQuery failed with CUDA_ERROR_SIMULATED (700)" in message


def test_a_library_that_does_not_exist_is_refused() -> None:
    with pytest.raises(native.RingError, match="cannot be loaded"):
        native.DeviceRecorder(None, 0, "libno-such-driver.so")


def test_the_work_of_a_microbatch_is_a_note(ring_path: pathlib.Path, clock: FakeRingClock) -> None:
    recorder = host_recorder(ring_path, clock, [])
    recorder.begin_step(7)
    recorder.work(3, tokens=5000, pairs=5000 * 5000)
    recorder.work(4, tokens=2**40, pairs=1)
    first, second = records(ring_path)
    assert (first["kind"], first["flags"], first["duration"]) == (RecordKind.WORK, Flag.AUX_WORK, 0)
    assert (first["step"], first["microbatch"], first["aux"], first["ordinal"]) == (7, 3, 5000, 24415)
    assert (second["aux"], second["ordinal"]) == (2**32 - 1, 1)
