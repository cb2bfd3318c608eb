"""Native ring, read with the numpy type that all other readers use."""

import contextlib
import os
import pathlib
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common import trace
from megatronapp_native import RingError, RingReader, RingWriter, monotonic_ns, run_queue_ns

DEADLINE_S = 120.0
U8, U16, U32, U64 = 0xFF, 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF
FIELD_MAX = {
    "start_ns": U64,
    "duration_ns": U64,
    "step": U32,
    "ordinal": U32,
    "aux": U32,
    "comm": U16,
    "microbatch": U16,
    "kind": U8,
    "chunk": U8,
    "layer": U8,
    "flags": U8,
}
fields = st.tuples(*(st.integers(0, largest) for largest in FIELD_MAX.values()))

PRODUCER = """
import sys
from megatronapp_native import RingWriter
writer = RingWriter(sys.argv[1], int(sys.argv[2]), 4, b"")
step = 0
while True:
    writer.record(step, step * 8 % (1 << 32), step % (1 << 32), ~step % (1 << 32), step * 7 % (1 << 32),
                  step % 65536, ~step % 65536, step % 256, ~step % 256, step * 3 % 256, 0)
    step += 1
"""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "deadline passed"
        time.sleep(0.001)


def decode(data: bytes) -> np.ndarray:
    return np.frombuffer(data, trace.RECORD)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "job.rank0.ring")


@contextlib.contextmanager
def producer(path: str, capacity: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PRODUCER, path, str(capacity)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@given(records=st.lists(fields, min_size=1, max_size=40), capacity=st.integers(1, 50))
def test_records_are_read_back_as_the_schema_defines(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, ...]], capacity: int
) -> None:
    path = str(tmp_path_factory.mktemp("ring") / "ring")
    writer = RingWriter(path, capacity, 1, b"")
    for record in records:
        writer.record(*record)
    data, lost = RingReader(path).read(1000)
    newest = records[-capacity:]
    assert lost == len(records) - len(newest)
    for got, sent in zip(decode(data), newest, strict=True):
        start, duration, *rest, flags = sent
        units = duration // trace.DURATION_UNIT_NS
        saturated = units > trace.MAX_DURATION_UNITS
        expected_flags = flags | (trace.Flag.SATURATED if saturated else 0)
        expected = (start, min(units, trace.MAX_DURATION_UNITS), *rest, expected_flags)
        assert tuple(got.tolist()) == expected


@pytest.mark.parametrize(("position", "name"), list(enumerate(FIELD_MAX)))
@pytest.mark.parametrize("value", [-1, "too large"])
def test_numbers_that_do_not_fit_are_refused_by_name(path: str, position: int, name: str, value: object) -> None:
    writer = RingWriter(path, 4, 0, b"")
    arguments: list[int] = [0] * len(FIELD_MAX)
    arguments[position] = FIELD_MAX[name] + 1 if value == "too large" else -1
    with pytest.raises(OverflowError, match=rf"{name} must lie between 0 and {FIELD_MAX[name]}"):
        writer.record(*arguments)
    assert RingReader(path).info().head == 0


def test_wrong_calls_are_type_errors(path: str) -> None:
    writer = RingWriter(path, 4, 0, b"")
    with pytest.raises(TypeError, match="takes 11 positional arguments, not 1"):
        writer.record(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        writer.record("now", *[0] * 10)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="was not called"):
        RingWriter.record(RingWriter.__new__(RingWriter), *[0] * 11)


def test_a_reader_reads_in_chunks_and_knows_its_position(path: str) -> None:
    writer = RingWriter(path, 8, 0, b"")
    reader = RingReader(path)
    for step in range(5):
        writer.record(0, 0, step, 0, 0, 0, 0, 0, 0, 0, 0)
    assert decode(reader.read(3)[0])["step"].tolist() == [0, 1, 2]
    assert reader.next_index == 3
    for step in range(5, 20):
        writer.record(0, 0, step, 0, 0, 0, 0, 0, 0, 0, 0)
    data, lost = reader.read(100)
    assert decode(data)["step"].tolist() == list(range(12, 20))
    assert lost == 9
    assert reader.next_index == 20
    assert reader.read(100) == (b"", 0)


def test_info_has_what_the_agent_needs(path: str) -> None:
    before = time.time_ns()
    writer = RingWriter(path, 16, 3, b'{"rank": 5}')
    writer.open_span(trace.RecordKind.FORWARD, 12, 2, 99)
    info = RingReader(path).info()
    assert (info.attempt, info.capacity, info.head, info.overwritten, info.closed) == (3, 16, 0, 0, False)
    assert info.pid == os.getpid()
    assert info.metadata == b'{"rank": 5}'
    assert info.boot_id == pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert info.clock_id == time.CLOCK_MONOTONIC
    assert info.open_span is not None
    span = info.open_span
    assert (span.kind, span.step, span.microbatch, span.start_ns) == (trace.RecordKind.FORWARD, 12, 2, 99)
    [(monotonic, realtime)] = info.clock_pairs
    assert monotonic <= monotonic_ns()
    assert before <= realtime <= time.time_ns()
    writer.close_span()
    assert RingReader(path).info().open_span is None


def test_close_marks_and_unlinks(path: str) -> None:
    writer = RingWriter(path, 4, 0, b"")
    reader = RingReader(path)
    writer.close(False)
    assert pathlib.Path(path).exists()
    assert reader.info().closed
    writer.close(True)
    assert not pathlib.Path(path).exists()
    reader.close()
    with pytest.raises(RingError, match="closed"):
        reader.read(1)


def test_file_mode_and_memory(path: str) -> None:
    RingWriter(path, 65536, 0, b"")
    status = pathlib.Path(path).stat()
    assert stat.S_IMODE(status.st_mode) == 0o640
    assert status.st_blocks * 512 >= status.st_size >= 65536 * trace.RECORD_BYTES


NO_SPACE = """
import pathlib, resource, sys
from megatronapp_native import RingError, RingWriter
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    RingWriter(sys.argv[1], 65536, 0, b"")
except RingError as error:
    print(error)
sys.exit(len(list(pathlib.Path(sys.argv[1]).parent.iterdir())))
"""


def test_missing_space_is_an_error_at_creation_and_leaves_no_file(path: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_SPACE, path, "limited"],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "no room for a ring of" in done.stdout


def test_a_full_file_system_is_an_error_at_creation(tmp_path: pathlib.Path) -> None:
    """Use a real tmpfs of 1 MiB, in a separate mount namespace; needs the right to mount."""
    folder = tmp_path / "small"
    folder.mkdir()
    script = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1/ring"'
    unshare = ["unshare", "--mount", "--map-root-user"]
    try:
        allowed = subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", str(folder)], check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this user may not mount")
    done = subprocess.run(
        [*unshare, "sh", "-c", script, "sh", str(folder), sys.executable, NO_SPACE],
        check=False,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout


def test_missing_directory_and_foreign_files_are_ring_errors(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RingError, match="cannot create the ring: No such file or directory"):
        RingWriter(str(tmp_path / "missing" / "ring"), 4, 0, b"")
    with pytest.raises(RingError, match="No such file"):
        RingReader(str(tmp_path / "ring"))
    (tmp_path / "ring").write_bytes(b"x" * 5000)
    with pytest.raises(RingError, match="wrong magic number"):
        RingReader(str(tmp_path / "ring"))
    with pytest.raises(RingError, match="not a regular file"):
        RingReader(str(tmp_path))


@given(data=st.binary(max_size=3000))
def test_any_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("ring") / "ring"
    path.write_bytes(data)
    with pytest.raises(RingError):
        RingReader(str(path))


def check_consistent(records: np.ndarray, first: int) -> None:
    step = np.arange(first, first + len(records), dtype=np.uint64)
    assert np.array_equal(records["start_ns"], step)
    assert np.array_equal(records["step"], step.astype(np.uint32))
    assert np.array_equal(records["ordinal"], ~step.astype(np.uint32))
    assert np.array_equal(records["microbatch"], ~step.astype(np.uint16))
    assert np.array_equal(records["chunk"], ~step.astype(np.uint8))


@pytest.mark.parametrize("expected", [700, 1500, 4000])
def test_reader_of_a_killed_producer_gets_all_whole_records(path: str, expected: int) -> None:
    capacity = 1024
    with producer(path, capacity) as process:
        wait_until(pathlib.Path(path).exists)
        live = RingReader(path)
        wait_until(lambda: live.info().head >= expected)
        process.send_signal(signal.SIGKILL)
        process.wait()
    reader = RingReader(path)
    info = reader.info()
    assert not info.closed
    assert info.pid == process.pid
    data, lost = reader.read(capacity)
    records = decode(data)
    assert lost + len(records) == info.head
    assert len(records) >= min(info.head, capacity - 1)
    check_consistent(records, lost)


def test_readers_of_a_live_producer_see_only_whole_records(path: str) -> None:
    with producer(path, 64):
        wait_until(pathlib.Path(path).exists)
        readers = [RingReader(path) for _ in range(2)]
        seen = [0, 0]

        def drain(index: int) -> None:
            reader = readers[index]
            end = time.monotonic() + DEADLINE_S
            while seen[index] < 20_000 and time.monotonic() < end:
                data, _ = reader.read(64)
                records = decode(data)
                check_consistent(records, reader.next_index - len(records))
                seen[index] += len(records)

        threads = [threading.Thread(target=drain, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert min(seen) >= 20_000


def test_threads_may_use_a_common_reader(path: str) -> None:
    writer = RingWriter(path, 4096, 0, b"")
    for step in range(4000):
        writer.record(step, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    reader = RingReader(path)
    starts: list[int] = []

    def drain() -> None:
        while chunk := reader.read(7)[0]:
            starts.extend(decode(chunk)["start_ns"].tolist())

    threads = [threading.Thread(target=drain) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(starts) == list(range(4000))


def test_clocks() -> None:
    before = time.monotonic_ns()
    assert before <= monotonic_ns() <= time.monotonic_ns()
    if pathlib.Path("/proc/thread-self/schedstat").exists():
        waited = int(pathlib.Path("/proc/thread-self/schedstat").read_text().split()[1])
        assert waited <= run_queue_ns()
