import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatronapp_analyzer.agent import rings
from megatronapp_analyzer.agent.rings import (
    CLOCK_RESEND_NS,
    FRAME_RECORDS,
    MAX_FRAMES_PER_READ,
    RingDirectory,
    RingLibrary,
    process_state,
)
from megatronapp_common import frames
from megatronapp_common.pid_namespace import pid_namespace
from megatronapp_common.trace import RECORD_BYTES


class FakeRingError(Exception):
    pass


@dataclasses.dataclass
class Info:
    """Header of a fake ring."""

    attempt: int = 0
    capacity: int = 1024
    closed: bool = False
    boot_id: str = "boot"
    pid: int = dataclasses.field(default_factory=os.getpid)
    heartbeat_ns: int = 5
    open_span: Any = None
    device_span: Any = None
    clock_pairs: list[tuple[int, int]] = dataclasses.field(default_factory=lambda: [(0, 1)])
    metadata: bytes = b'{"world": 1}'


class FakeRing:
    """Ring that returns `count` records, and loses what a test sets."""

    def __init__(self, path: str) -> None:
        if not Path(path).read_bytes():
            raise FakeRingError("empty file")
        self.ring_info = Info()
        self.count = 0
        self.next_index = 0
        self.lose = 0
        self.broken = False

    def read(self, max_records: int) -> tuple[bytes, int]:
        if self.broken:
            raise FakeRingError("shrunk")
        lost, self.lose = self.lose, 0
        taken = min(max_records, self.count)
        self.count -= taken
        self.next_index += lost + taken
        return bytes(taken * RECORD_BYTES), lost

    def info(self) -> Info:
        return self.ring_info

    def close(self) -> None:
        pass


class Shelf:
    """Factory of ring files that remembers the readers that were opened on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: dict[str, FakeRing] = {}
        self.directory = RingDirectory(folder, "job", 3, RingLibrary(open=self._open, error=FakeRingError))

    def _open(self, path: str) -> FakeRing:
        ring = FakeRing(path)
        self.opened[Path(path).name] = ring
        return ring

    def put(self, name: str, data: bytes = b"ring") -> None:
        (self.folder / name).write_bytes(data)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_only_rings_of_this_worker_are_found(shelf: Shelf) -> None:
    for name in ("job.rank0.ring", "job.worker.ring", "job.progress", "job2.rank1.ring", "job.rank1.ring.new"):
        shelf.put(name)
    assert [source.ring for source in shelf.directory.discover()] == [0, None]
    shelf.put("job.rank12.ring")
    assert [source.ring for source in shelf.directory.discover()] == [12]
    assert shelf.directory.discover() == []


def test_a_ring_that_is_being_made_is_tried_again(shelf: Shelf) -> None:
    shelf.put("job.rank0.ring", b"")
    assert shelf.directory.discover() == []
    shelf.put("job.rank0.ring", b"whole")
    assert len(shelf.directory.discover()) == 1


def test_records_carry_their_index_and_what_was_lost(shelf: Shelf) -> None:
    shelf.put("job.rank0.ring")
    (source,) = shelf.directory.discover()
    ring = shelf.opened["job.rank0.ring"]
    ring.count = FRAME_RECORDS + 5
    assert [(packet.first, packet.end) for packet in source.read()] == [
        (0, FRAME_RECORDS),
        (FRAME_RECORDS, FRAME_RECORDS + 5),
    ]
    ring.count, ring.lose = 2, 7
    (packet,) = source.read()
    frame = frames.decode(packet.data)
    assert dict(frame.header) == {"rank": 0, "worker": 3, "first": FRAME_RECORDS + 12, "lost": 7}
    assert len(frame.body) == 2 * RECORD_BYTES
    assert source.status(9)["lost"] == 7


def test_a_long_ring_does_not_starve_the_others(shelf: Shelf) -> None:
    shelf.put("job.rank0.ring")
    (source,) = shelf.directory.discover()
    shelf.opened["job.rank0.ring"].count = 100 * FRAME_RECORDS
    assert len(source.read()) == MAX_FRAMES_PER_READ


def test_a_closed_ring_ends_after_it_was_read_to_its_end(shelf: Shelf) -> None:
    shelf.put("job.rank0.ring")
    (source,) = shelf.directory.discover()
    ring = shelf.opened["job.rank0.ring"]
    source.read()
    assert not source.ended
    ring.ring_info.closed = True
    ring.count = (MAX_FRAMES_PER_READ + 1) * FRAME_RECORDS
    rounds = 0
    while not shelf.directory.all_ended:
        source.read()
        rounds += 1
    assert rounds == 2
    assert ring.count == 0


def test_an_unlinked_ring_ends(shelf: Shelf) -> None:
    shelf.put("job.rank0.ring")
    (source,) = shelf.directory.discover()
    shelf.opened["job.rank0.ring"].count = 3
    (shelf.folder / "job.rank0.ring").unlink()
    assert len(source.read()) == 1
    assert source.ended
    assert source.read() == []


def test_a_ring_whose_process_died_ends(shelf: Shelf) -> None:
    shelf.put("job.rank0.ring")
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (source,) = shelf.directory.discover()
    shelf.opened["job.rank0.ring"].ring_info.pid = process.pid
    source.read()
    assert source.status(0)["alive"]
    process.communicate(b"\n")
    source.read()
    assert source.ended
    assert not source.status(0)["alive"]


def test_a_process_that_was_never_seen_counts_as_alive(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatronapp_analyzer.agent.rings.process_state", lambda pid: None)
    shelf.put("job.rank0.ring")
    (source,) = shelf.directory.discover()
    source.read()
    assert not source.ended
    assert source.status(0) | {"nowNs": 0} == {
        "rank": 0,
        "heartbeatNs": 5,
        "nowNs": 0,
        "openSpan": None,
        "deviceSpan": None,
        "lost": 0,
        "closed": False,
        "alive": True,
        "processState": None,
    }


def test_a_garbled_ring_is_treated_as_ended(shelf: Shelf) -> None:
    shelf.put("job.rank0.ring")
    (source,) = shelf.directory.discover()
    shelf.opened["job.rank0.ring"].broken = True
    assert source.read() == []
    assert source.ended


def test_clock_pairs_are_resent_on_change_and_periodically(shelf: Shelf) -> None:
    shelf.put("job.rank0.ring")
    (source,) = shelf.directory.discover()
    info = shelf.opened["job.rank0.ring"].ring_info
    assert source.has_new_clock(0)
    info.clock_pairs = [(2, 3)]
    assert not source.has_new_clock(CLOCK_RESEND_NS - 1)
    assert source.has_new_clock(CLOCK_RESEND_NS)
    assert not source.has_new_clock(3 * CLOCK_RESEND_NS)
    header = frames.decode(source.ring_frame()).header
    assert json.loads(json.dumps(header)) == {
        "rank": 0,
        "worker": 3,
        "metadata": {"world": 1},
        "bootId": "boot",
        "clockPairs": [[2, 3]],
        "capacity": 1024,
    }


def test_process_state() -> None:
    assert process_state(os.getpid()) in ("R", "S")
    assert process_state(2**22 + 1) is None


@pytest.mark.parametrize(("namespace", "state"), [(None, "R"), (pid_namespace(), "R"), (1, None)])
def test_a_pid_of_another_namespace_is_not_taken_for_a_local_process(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, namespace: int | None, state: str | None
) -> None:
    """Check a number of another pod's process: the agent does not share the trainer's processes, so any process may
    have it, and end."""
    found = {"state": "R"}
    monkeypatch.setattr(rings, "process_state", lambda _pid: found["state"])
    metadata = json.dumps({"world": 1, "pidNamespace": namespace}).encode()
    monkeypatch.setattr(FakeRing, "info", lambda _self: Info(metadata=metadata))
    shelf.put("job.rank0.ring")
    (source,) = shelf.directory.discover()
    assert source.status(0)["processState"] == state
    found["state"] = "Z"
    source.read()
    assert source.status(0)["alive"] is (state is None)
