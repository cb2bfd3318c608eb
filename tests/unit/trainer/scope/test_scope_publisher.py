"""Thread that sends: for any behaviour of its peer, no thread waits for it, and what is lost is counted."""

import asyncio
import pathlib
import select
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.agent import scope as agent_scope
from megatronapp_analyzer.agent.scope import LIMIT_BYTES, ScopeSocket
from megatronapp_analyzer.scope.parts.part_tracker import PartTracker, part_of
from megatronapp_common.frames import Frame, FrameType, encode, frame_length
from megatronapp_common.frames import decode as decoded
from megatronapp_common.scope.protocol import MAX_PART_BYTES
from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.scope.transfer import publisher as publishing
from megatronapp_trainer.scope.transfer.publisher import (
    BOUND_BYTES,
    FRAME_COST,
    MOST_COMING,
    DropPolicy,
    FramePublisher,
    FrameQueue,
    ReadyFrames,
    cost_of,
)

HELLO = Frame(FrameType.SCOPE_PUBLISHER, {"rank": 3})
BODY = 100 << 10
DEADLINE_S = 120.0


@pytest.fixture
def path() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        yield pathlib.Path(folder) / "scope.sock"


def listening(path: pathlib.Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(DEADLINE_S)
    return listener


def accepted(listener: socket.socket) -> socket.socket:
    peer, _ = listener.accept()
    peer.settimeout(DEADLINE_S)
    return peer


def read(peer: socket.socket) -> Frame:
    head = received(peer, 16)
    return decoded(head + received(peer, frame_length(head) - 16))


def received(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = peer.recv(count - len(data))
        assert more, "the publisher hung up"
        data += more
    return data


def part(number: int) -> Frame:
    return Frame(FrameType.SCOPE_PART, {"step": number}, bytes(BODY))


@pytest.fixture
def publisher(path: pathlib.Path) -> Iterator[FramePublisher]:
    frame_publisher = FramePublisher(path, HELLO, bound_bytes=1 << 20)
    frame_publisher.start()
    yield frame_publisher
    frame_publisher.close()


def test_frames_arrive_in_order_after_the_publisher_frame(path: pathlib.Path, publisher: FramePublisher) -> None:
    with listening(path) as listener:
        publisher.post(ReadyFrames([part(0), part(1)]))
        with accepted(listener) as peer:
            assert read(peer).header == {"rank": 3}
            publisher.post(ReadyFrames([part(2)]))
            assert [read(peer).header["step"] for _ in range(3)] == [0, 1, 2]
    assert publisher.dropped == 0


def test_a_path_longer_than_the_address_of_a_socket_is_connected_to(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    with agent_scope.listening(folder) as listener:
        listener.settimeout(DEADLINE_S)
        frame_publisher = FramePublisher(folder / "scope.sock", HELLO)
        frame_publisher.start()
        with accepted(listener) as peer:
            assert read(peer).header == {"rank": 3}
        frame_publisher.close()
        assert not frame_publisher.failures


def test_a_connection_that_cannot_be_made_is_reported_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    frame_publisher = FramePublisher(tmp_path / "file" / "scope.sock", HELLO)
    assert not frame_publisher._connect() and not frame_publisher._connect()
    assert list(frame_publisher.failures) == [
        f"no connection to {tmp_path}/file/scope.sock: [Errno 20] Not a directory: '{tmp_path}/file'"
    ]


def test_an_agent_that_is_absent_for_long_is_reported_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame_publisher = FramePublisher(tmp_path / "scope.sock", HELLO)
    assert not frame_publisher._connect() and not frame_publisher._connect()
    assert not frame_publisher.failures
    monkeypatch.setattr(publishing, "_ABSENT_S", 0.0)
    assert not frame_publisher._connect() and not frame_publisher._connect()
    assert list(frame_publisher.failures) == [
        f"no agent has listened at {tmp_path}/scope.sock for 0 s; see the log of the agent"
    ]


class Step:
    """A step, prompt or probe of some numbers on the host; `ready` as it says."""

    def __init__(self, number: int, *, kind: DropPolicy = DropPolicy.STEP, frames: int = 1, body: int = BODY) -> None:
        self.kind = kind
        self.nbytes = frames * body
        self.is_ready = True
        self._headers = deque(self._header(number, more=place + 1 < frames) for place in range(frames))
        self._body = bytes(body)

    def _header(self, number: int, *, more: bool) -> dict[str, Any]:
        name = "probe" if self.kind is DropPolicy.PROBE else "run"
        return {name: str(number) if self.kind is DropPolicy.PROBE else "r", "step": number, "more": more}

    def split(self) -> "list[Step]":
        return [self]

    def ready(self) -> bool:
        return self.is_ready

    def build(self) -> Iterator[Frame]:
        while self._headers:
            yield Frame(FrameType.SCOPE_PART, self._headers[0], self._body)
            self._headers.popleft()

    def marks(self) -> list[Frame]:
        return [Frame(FrameType.SCOPE_PART, header | {"dropped": True}) for header in self._headers]


def test_a_stalled_peer_loses_the_oldest_steps_which_are_marked_dropped(
    path: pathlib.Path, publisher: FramePublisher
) -> None:
    with listening(path) as listener, accepted(listener) as peer:
        publisher.post(ReadyFrames([Frame(FrameType.SCOPE_TOKENS, {"step": 0})]))
        for number in range(40):
            publisher.post(Step(number))
            assert publisher.queued_bytes <= (1 << 20) + 41 * FRAME_COST
        assert read(peer).header == {"rank": 3}
        assert read(peer).header == {"step": 0}
        headers = [read(peer).header for _ in range(40)]
    assert [header["step"] for header in headers] == list(range(40))
    dropped = [header["step"] for header in headers if header.get("dropped")]
    assert publisher.dropped == len(dropped) >= 25
    assert dropped[-1] <= 31  # the newest megabyte is there; before it the socket's buffer may have taken some
    assert {header["part"] for header in headers} == {0}


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_slow_reader_loses_nothing_of_probes_and_prompts(data: st.DataObject) -> None:
    kinds = st.sampled_from([DropPolicy.STEP, DropPolicy.PROMPTS, DropPolicy.PROBE])
    posted = data.draw(st.lists(st.tuples(kinds, st.integers(1, 4)), min_size=1, max_size=16))
    bound = 8 * BODY
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "scope.sock"
        with listening(path) as listener:
            frame_publisher = FramePublisher(path, HELLO, bound_bytes=bound, waiting_bytes=64 * (BODY + FRAME_COST))
            frame_publisher.start()
            with accepted(listener) as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                delivered = 0
                for number, (kind, frames) in enumerate(posted):
                    frame_publisher.post(Step(number, kind=kind, frames=frames))
                    delivered += (kind is not DropPolicy.STEP) * (frames * BODY + FRAME_COST)
                    assert frame_publisher.queued_bytes <= delivered + bound + len(posted) * FRAME_COST
                headers = [read(peer).header for _ in range(1 + sum(frames for _, frames in posted))][1:]
            frame_publisher.close()
    for number, (kind, frames) in enumerate(posted):
        mine = [header for header in headers if header["step"] == number]
        assert [header["part"] for header in mine] == list(range(frames))
        assert [header["more"] for header in mine] == [True] * (frames - 1) + [False]
        dropped = [header.get("dropped", False) for header in mine]
        assert set(dropped) <= ({True, False} if kind is DropPolicy.STEP else {False})
        assert len(set(dropped)) == 1, "whole steps only"


def received_headers(sender: FramePublisher, path: pathlib.Path, count: int) -> list[Mapping[str, Any]]:
    """Return the headers of a publisher's first frames, after the one that names it."""
    with listening(path) as listener:
        sender.start()
        with accepted(listener) as peer:
            read(peer)
            headers = [read(peer).header for _ in range(count)]
    sender.close()
    return headers


def test_the_newest_step_is_retained_however_large(path: pathlib.Path) -> None:
    frame_publisher = FramePublisher(path, HELLO, bound_bytes=BODY)
    for number in range(3):
        frame_publisher.post(Step(number, frames=4))
        assert frame_publisher.queued_bytes <= 4 * BODY + 3 * FRAME_COST
    headers = received_headers(frame_publisher, path, 12)
    assert [header.get("dropped", False) for header in headers] == [True] * 8 + [False] * 4


def test_probes_and_steps_alternate(path: pathlib.Path) -> None:
    late = Step(0, kind=DropPolicy.PROBE, frames=6, body=1 << 10)
    late.is_ready = False
    frame_publisher = FramePublisher(path, HELLO)
    frame_publisher.post(late)
    for number in range(3):
        frame_publisher.post(Step(number, body=1 << 10))
    late.is_ready = True
    names = ["probe" in header for header in received_headers(frame_publisher, path, 9)]
    assert names == [False, True, False, True, False, True, True, True, True]


def test_a_probe_that_exceeds_the_memory_is_reported_dropped(path: pathlib.Path) -> None:
    frame_publisher = FramePublisher(path, HELLO, waiting_bytes=4 * BODY)
    for number, frames in enumerate((2, 3, 1)):
        frame_publisher.post(Step(number, kind=DropPolicy.PROBE, frames=frames))
    headers = received_headers(frame_publisher, path, 6)
    assert [(header["probe"], header.get("dropped", False)) for header in headers] == [
        *[("0", False)] * 2,
        *[("1", True)] * 3,
        ("2", False),
    ]
    assert frame_publisher.dropped == 1


def test_a_probe_larger_than_the_memory_is_sent_alone() -> None:
    waiting = FrameQueue(1 << 20, 4 * BODY)
    for number in range(2):
        waiting.put(Step(number, kind=DropPolicy.PROBE, frames=8))
    assert waiting.dropped == 1
    first = waiting.take(probes=True)
    assert first is not None and first.kind is DropPolicy.PROBE


def test_steps_that_were_sent_are_forgotten() -> None:
    waiting = FrameQueue(1 << 20, 1 << 20)
    for number in range(3000):
        waiting.put(Step(number, body=8))
        taken = waiting.take(probes=False)
        assert taken is not None
        waiting.release(taken.kind, cost_of(taken))
    assert not waiting._steps


def test_a_peer_that_dies_is_found_again(path: pathlib.Path, publisher: FramePublisher) -> None:
    with listening(path) as listener:
        with accepted(listener) as peer:
            read(peer)
        for number in range(3):  # some of them may go to the dead peer
            publisher.post(ReadyFrames([part(number)]))
        with accepted(listener) as peer:
            assert read(peer).header == {"rank": 3}
            publisher.post(ReadyFrames([part(9)]))
            steps = [read(peer).header["step"]]
            while steps[-1] != 9:
                steps.append(read(peer).header["step"])
        assert steps == sorted(steps)


def test_steps_without_a_reader_are_bounded(path: pathlib.Path, publisher: FramePublisher) -> None:
    for number in range(40):
        publisher.post(Step(number))
        assert publisher.queued_bytes <= (1 << 20) + 40 * FRAME_COST
    with listening(path) as listener, accepted(listener) as peer:
        assert read(peer).header == {"rank": 3}
        headers = [read(peer).header for _ in range(40)]
    assert [header["step"] for header in headers if not header.get("dropped")] == list(range(publisher.dropped, 40))


def test_frames_of_rank_0_are_bounded_and_the_newest_retained(path: pathlib.Path) -> None:
    frame_publisher = FramePublisher(path, HELLO, bound_bytes=64 * FRAME_COST)
    for number in range(100):
        frame_publisher.post(ReadyFrames([Frame(FrameType.SCOPE_TOKENS, {"step": number})]))
        assert frame_publisher.queued_bytes <= 64 * FRAME_COST
    with listening(path) as listener:
        frame_publisher.start()
        with accepted(listener) as peer:
            read(peer)
            steps = [read(peer).header["step"] for _ in range(100 - frame_publisher.dropped)]
    frame_publisher.close()
    assert steps == list(range(frame_publisher.dropped, 100))


def test_steps_that_never_become_ready_are_bounded(publisher: FramePublisher) -> None:
    steps = [Step(number) for number in range(MOST_COMING + 5)]
    for step in steps:
        step.is_ready = False
        publisher.post(step)
    assert publisher.queued_bytes <= (1 << 20) + len(steps) * FRAME_COST
    assert publisher.dropped >= len(steps) - (1 << 20) // BODY
    for step in steps:
        step.is_ready = True


def test_unsendable_steps_are_counted_and_logged(path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    class FailingStep(Step):
        def build(self) -> Iterator[Frame]:
            yield next(super().build())
            self._headers.popleft()
            raise KeyError("no such row")

    class TooLarge(Step):
        def build(self) -> Iterator[Frame]:
            yield next(super().build())
            self._headers.popleft()
            yield Frame(FrameType.SCOPE_PART, self._headers[0], bytes(MAX_PART_BYTES))

    publisher = FramePublisher(path, HELLO)
    for step in (FailingStep(0, frames=3), TooLarge(1, frames=2), Step(2)):
        publisher.post(step)
    headers = received_headers(publisher, path, 6)
    seen = [(header["step"], header["part"], header.get("dropped", False)) for header in headers]
    assert seen == [(0, 0, False), (0, 1, True), (0, 2, True), (1, 0, False), (1, 1, True), (2, 0, False)]
    assert next(iter(publisher.failures)) == "'no such row'"
    assert any("no such row" in line for line in caplog.messages)
    assert publisher.dropped == 2


def test_the_end_sends_what_is_left(path: pathlib.Path) -> None:
    with listening(path) as listener:
        frame_publisher = FramePublisher(path, HELLO)
        frame_publisher.start()
        frame_publisher.post(ReadyFrames([part(number) for number in range(5)]))
        peer = accepted(listener)
        with peer:
            assert read(peer).header == {"rank": 3}
            closing = threading.Thread(target=frame_publisher.close, kwargs={"timeout_s": DEADLINE_S})
            closing.start()
            assert [read(peer).header["step"] for _ in range(5)] == list(range(5))
            assert peer.recv(1) == b""
            closing.join()
    assert len(encode(HELLO)) % 8 == 0


@pytest.mark.asyncio
async def test_a_slow_hub_after_the_agent_gets_the_whole_probe_and_every_step_number(
    path: pathlib.Path,
) -> None:
    """The real agent's socket: while the hub takes nothing, all but its 8 MiB waits in the rank."""
    agent = ScopeSocket(path.parent, lambda: None)
    probe, steps = PartTracker(), {number: PartTracker() for number in range(30)}
    async with asyncio.timeout(DEADLINE_S), agent.running():
        frame_publisher = FramePublisher(path, Frame(FrameType.SCOPE_PUBLISHER, {"rank": 0}))
        frame_publisher.start()
        frame_publisher.post(Step(0, kind=DropPolicy.PROBE, frames=24, body=1 << 20))
        for number in steps:
            frame_publisher.post(Step(number, body=1 << 20))
        while agent.buffer.held_bytes < LIMIT_BYTES:
            await asyncio.sleep(0)
        assert agent.buffer.held_bytes < LIMIT_BYTES + (2 << 20)
        assert frame_publisher.queued_bytes <= BOUND_BYTES + (26 << 20)
        while not (probe.finished and all(step.finished for step in steps.values())):
            if (data := agent.pop()) is not None and (frame := decoded(data)).type == FrameType.SCOPE_PART:
                assert len(data) <= MAX_PART_BYTES
                of = probe if "probe" in frame.header else steps[frame.header["step"]]
                of.add(part_of(0, frame.header))
            await asyncio.sleep(0)
        await asyncio.to_thread(frame_publisher.close)
    assert not probe.dropped
    dropped = [number for number, step in steps.items() if step.dropped]
    assert 0 < len(dropped) == frame_publisher.dropped and 29 not in dropped


def test_frames_are_sent_in_idle_windows_or_when_too_many_wait(
    path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_IDLE_WINDOW_S", 600)
    idle_window = IdleWindow()
    frame_publisher = FramePublisher(path, HELLO, idle_window=idle_window)
    with listening(path) as listener:
        frame_publisher.start()
        for number in range(publishing._MAX_LAG_STEPS + 4):
            frame_publisher.post(Step(number, body=1))
        with accepted(listener) as peer:
            assert read(peer).header == {"rank": 3}
            assert [read(peer).header["step"] for _ in range(4)] == list(range(4))
            assert not select.select([peer], [], [], 0)[0]
            with idle_window:
                assert [read(peer).header["step"] for _ in range(8)] == list(range(4, 12))
            frame_publisher.post(Step(12, body=1))
            frame_publisher.close()  # the rest is sent without an idle window
            assert read(peer).header["step"] == 12
