"""Waits of transfers in any order: the time in which the rank could run nothing, none where a message was early."""

import pathlib
from collections.abc import Callable

import numpy as np
import pytest

import megatronapp_native as native
from megatronapp_common.trace import DURATION_UNIT_NS, NO_MICROBATCH, RECORD, Flag, RecordKind
from megatronapp_trainer.hooks.transfer_observer import ObservedCopy, PassKey
from megatronapp_trainer.scan.recorder import Recorder
from megatronapp_trainer.scan.task_transfers import TaskTransfers, message_number

FORWARD = PassKey(RecordKind.FORWARD, 1, 5)
BACKWARD = PassKey(RecordKind.BACKWARD, 0, 2)
UNIT = DURATION_UNIT_NS


class TracedRank:
    """Rank 3 between ranks 2 and 4, on a clock that the test sets."""

    def __init__(self, path: pathlib.Path, withheld: Callable[[int], bool]) -> None:
        self.now_ns = 1_000_000_000
        self.waited_ns = 0
        self._path = path
        recorder = Recorder(
            native.RingWriter(str(path), 256, 0, b"{}"),
            monotonic_ns=lambda: self.now_ns,
            run_queue_ns=lambda: self.waited_ns,
            on_length=lambda fields, own_ns: None,
        )
        self.transfers = TaskTransfers(3, {(2, 3): 0, (4, 3): 1, (3, 4): 2}, recorder=recorder, withhold=withheld)

    def arrive(self, target: PassKey, source: int) -> None:
        self.transfers.arrived(target, ObservedCopy(source, 4096, self.now_ns - 10 * UNIT, self.now_ns - 2 * UNIT))

    def waits(self) -> list[tuple[int, int, int, int]]:
        """Slot, ordinal, start and length of the waits."""
        data, lost = native.RingReader(str(self._path)).read(100)
        assert lost == 0
        records = np.frombuffer(data, RECORD)
        return [
            (int(r["comm"]), int(r["ordinal"]), int(r["start_ns"]), int(r["duration"]) * UNIT)
            for r in records
            if r["kind"] == RecordKind.RECV_WAIT
        ]


@pytest.fixture
def rank(tmp_path: pathlib.Path) -> TracedRank:
    return TracedRank(tmp_path / "rank3.ring", lambda source: False)


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


def test_a_withheld_message_is_waited_for(tmp_path: pathlib.Path) -> None:
    def withhold(source: int) -> bool:
        receiver.now_ns += 70 * UNIT
        return source == 2

    receiver = TracedRank(tmp_path / "rank3.ring", withhold)
    receiver.arrive(FORWARD, 2)
    receiver.transfers.take(FORWARD)
    assert [length for *_, length in receiver.waits()] == [70 * UNIT]


def test_sends_and_copies_carry_the_number_of_the_pass_that_takes_them(tmp_path: pathlib.Path) -> None:
    rank = TracedRank(tmp_path / "rank3.ring", lambda source: False)
    with rank.transfers.sending(4, FORWARD, 4096):
        rank.now_ns += UNIT
    rank.arrive(BACKWARD, 4)
    data, _ = native.RingReader(str(tmp_path / "rank3.ring")).read(100)
    send, copy = np.frombuffer(data, RECORD)
    assert (send["kind"], send["comm"], send["ordinal"]) == (RecordKind.SEND_POST, 2, 3 << 24 | 1 << 16 | 5)
    assert (copy["kind"], copy["comm"], copy["ordinal"]) == (RecordKind.COPY, 1, 4 << 24 | 2)
    assert (copy["duration"], copy["aux"], copy["flags"]) == (8, 256, Flag.AUX_BYTES)
    assert NO_MICROBATCH not in {int(send["microbatch"]), int(copy["microbatch"])}
