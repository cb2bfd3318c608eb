"""Waits of transfers in any order: the time in which the rank could run nothing, none where a message was early."""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import megatronapp_native as native
from megatronapp_common.trace import DURATION_UNIT_NS, NO_MICROBATCH, RECORD, Flag, RecordKind, TransferPath
from megatronapp_trainer.errors import PeerLostError
from megatronapp_trainer.hooks.transfer_observer import ObservedCopy, PassKey
from megatronapp_trainer.pipeline.planning.tasks import Placement, Task
from megatronapp_trainer.pipeline.transport.task_transport import ObservedTaskTransport, Posted
from megatronapp_trainer.scan.recorder import Recorder
from megatronapp_trainer.scan.task_transfers import TaskTransfers, message_number

FORWARD = PassKey(RecordKind.FORWARD, 1, 5)
BACKWARD = PassKey(RecordKind.BACKWARD, 0, 2)
UNIT = DURATION_UNIT_NS


class TracedRank:
    """Rank 3 between ranks 2 and 4, on a clock that the test sets."""

    def __init__(self, path: pathlib.Path, withheld_ns: Callable[[int], int]) -> None:
        self.now_ns = 1_000_000_000
        self.waited_ns = 0
        self._path = path
        recorder = Recorder(
            native.RingWriter(str(path), 256, 0, b"{}"),
            monotonic_ns=lambda: self.now_ns,
            run_queue_ns=lambda: self.waited_ns,
            on_length=lambda kind, flags, own_ns: None,
        )
        self.transfers = TaskTransfers(3, {(2, 3): 0, (4, 3): 1, (3, 4): 2}, recorder=recorder, withheld_ns=withheld_ns)

    def arrive(self, target: PassKey, source: int, path: TransferPath = TransferPath.SHARED_MEMORY) -> None:
        copy = ObservedCopy(source, 4096, self.now_ns - 10 * UNIT, self.now_ns - 2 * UNIT, path)
        self.transfers.arrived(target, copy)

    def waits(self) -> list[tuple[int, int, int, int]]:
        """Slot, ordinal, start and length of the waits."""
        return [
            (int(r["comm"]), int(r["ordinal"]), int(r["start_ns"]), int(r["duration"]) * UNIT)
            for r in self.records(RecordKind.RECV_WAIT)
        ]

    def open_kind(self) -> int | None:
        """Kind of the span that the ring says is open."""
        span = native.RingReader(str(self._path)).info().open_span
        return None if span is None else int(span.kind)

    def records(self, kind: RecordKind) -> np.ndarray:
        """Records of a kind."""
        data, lost = native.RingReader(str(self._path)).read(100)
        assert lost == 0
        records = np.frombuffer(data, RECORD)
        found: np.ndarray = records[records["kind"] == kind]
        return found


@pytest.fixture
def rank(tmp_path: pathlib.Path) -> TracedRank:
    return TracedRank(tmp_path / "rank3.ring", lambda source: 0)


def test_a_wait_ends_as_the_message_of_the_next_pass_arrives(rank: TracedRank) -> None:
    begin_ns = rank.now_ns
    for _ in range(2):
        with rank.transfers.waiting():
            rank.now_ns += 50 * UNIT
    rank.arrive(BACKWARD, 4)
    rank.now_ns += 3 * UNIT
    rank.transfers.take(BACKWARD)
    assert rank.waits() == [(1, message_number(BACKWARD), begin_ns, 100 * UNIT)]


def test_a_message_that_was_there_in_time_is_not_waited_for(rank: TracedRank) -> None:
    rank.arrive(FORWARD, 2)
    with rank.transfers.waiting():
        rank.now_ns += 50 * UNIT
    rank.arrive(BACKWARD, 4)
    rank.transfers.take(BACKWARD)
    rank.now_ns += 200 * UNIT
    rank.transfers.take(FORWARD)
    (_, late), (other, in_time) = [(number, length) for _, number, _, length in rank.waits()]
    assert (late, in_time) == (50 * UNIT, 0)
    assert other == message_number(FORWARD)


def test_a_pass_without_a_message_ends_the_wait_without_a_record(rank: TracedRank) -> None:
    with rank.transfers.waiting():
        rank.now_ns += 50 * UNIT
    rank.transfers.take(PassKey(RecordKind.WEIGHT, 0, 0))
    rank.arrive(FORWARD, 2)
    rank.transfers.take(FORWARD)
    assert [length for *_, length in rank.waits()] == [0]


def test_a_copy_carries_its_path_and_size(rank: TracedRank) -> None:
    rank.arrive(FORWARD, 2)
    rank.arrive(BACKWARD, 4, TransferPath.UCX)
    assert [(r["layer"], r["aux"], r["duration"]) for r in rank.records(RecordKind.COPY)] == [(0, 256, 8), (2, 256, 8)]


def test_a_wait_that_fails_stays_open_for_readers_of_the_ring(rank: TracedRank) -> None:
    with rank.transfers.waiting():
        pass
    assert rank.open_kind() is None
    with pytest.raises(PeerLostError), rank.transfers.waiting():
        raise PeerLostError("rank 2 is lost")
    assert rank.open_kind() == RecordKind.RECV_WAIT


class TwoMessages:
    """A `TaskTransport` of two inputs that arrive at once, on the clock of a rank."""

    def __init__(self, rank: TracedRank, tasks: dict[Task, torch.Tensor]) -> None:
        self.limits_s: list[float | None] = []
        self.copying: set[Task] = set()
        self._rank = rank
        self._tasks = tasks

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def path_from(self, rank: int) -> TransferPath:
        return TransferPath.SHARED_MEMORY

    def poll(self) -> dict[Task, torch.Tensor]:
        arrived, self._tasks = self._tasks, {}
        return arrived

    def posted(self) -> dict[Task, Posted]:
        return {task: Posted(sender=0, number=1) for task in self._tasks}

    def take_posted(self, task: Task) -> torch.Tensor:
        return self._tasks.pop(task)

    def copied_ns(self, task: Task) -> tuple[int, int] | None:
        return None if task in self.copying else (self._rank.now_ns - 10 * UNIT, self._rank.now_ns)

    def wait(self, limit_s: float | None = None) -> None:
        self.limits_s.append(limit_s)
        self._rank.now_ns += 0 if limit_s is None else round(1e9 * limit_s)


def test_a_withheld_message_is_handed_out_at_its_time_and_other_tasks_run_until_then(tmp_path: pathlib.Path) -> None:
    rank = TracedRank(tmp_path / "rank3.ring", lambda source: 70 * UNIT if source == 2 else 0)
    late, in_time = Task.forward(5, 1), Task.backward(2, 0)
    inner = TwoMessages(rank, {late: torch.zeros(4), in_time: torch.ones(4)})
    transport = ObservedTaskTransport(
        inner, rank.transfers, placement=Placement(3, 2), rank=1, pipeline=[2, 3, 4], now_ns=lambda: rank.now_ns
    )
    assert list(transport.poll()) == [in_time]
    rank.transfers.take(BACKWARD)
    rank.now_ns += 50 * UNIT  # its pass
    assert not transport.poll()
    begin_ns = rank.now_ns
    transport.wait()
    assert inner.limits_s == [pytest.approx(20e-9 * UNIT)]
    assert list(transport.poll()) == [late]
    rank.transfers.take(FORWARD)
    transport.wait()
    assert inner.limits_s[1:] == [None]
    assert rank.waits()[-1] == (0, message_number(FORWARD), begin_ns, 20 * UNIT)
    assert [length for *_, length in rank.waits()] == [0, 20 * UNIT]
    (fault,) = rank.records(RecordKind.FAULT)
    assert (int(fault["start_ns"]), int(fault["duration"])) == (begin_ns - 50 * UNIT, 70)


def test_an_input_that_is_taken_on_its_way_is_recorded_once_it_is_copied(tmp_path: pathlib.Path) -> None:
    rank = TracedRank(tmp_path / "rank3.ring", lambda source: 70 * UNIT if withheld else 0)
    task, withheld = Task.forward(5, 1), True
    inner = TwoMessages(rank, {task: torch.zeros(4)})
    transport = ObservedTaskTransport(
        inner, rank.transfers, placement=Placement(3, 2), rank=1, pipeline=[2, 3, 4], now_ns=lambda: rank.now_ns
    )
    assert not transport.posted()  # a fault withholds messages of its sender
    withheld = False
    assert transport.posted() == {task: Posted(sender=0, number=1)}
    inner.copying.add(task)
    assert transport.take_posted(task).shape == (4,)
    assert not transport.poll()
    assert len(rank.records(RecordKind.COPY)) == 0
    inner.copying.clear()
    assert not transport.poll()
    (copy,) = rank.records(RecordKind.COPY)
    assert int(copy["duration"]) == 10
    assert not transport.poll()
    assert len(rank.records(RecordKind.COPY)) == 1


def test_sends_and_copies_carry_the_number_of_the_pass_that_takes_them(tmp_path: pathlib.Path) -> None:
    rank = TracedRank(tmp_path / "rank3.ring", lambda source: 0)
    with rank.transfers.sending(4, FORWARD, 4096):
        rank.now_ns += UNIT
    rank.arrive(BACKWARD, 4)
    data, _ = native.RingReader(str(tmp_path / "rank3.ring")).read(100)
    send, copy = np.frombuffer(data, RECORD)
    assert (send["kind"], send["comm"], send["ordinal"]) == (RecordKind.SEND_POST, 2, 3 << 24 | 1 << 16 | 5)
    assert (copy["kind"], copy["comm"], copy["ordinal"]) == (RecordKind.COPY, 1, 4 << 24 | 2)
    assert (copy["duration"], copy["aux"], copy["flags"]) == (8, 256, Flag.AUX_BYTES)
    assert NO_MICROBATCH not in {int(send["microbatch"]), int(copy["microbatch"])}
