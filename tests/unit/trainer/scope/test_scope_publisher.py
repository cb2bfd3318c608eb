"""The thread that sends: whatever its peer does, nobody waits for it, and what is lost is counted."""

import pathlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megatronapp_common.frames import Frame, FrameType, encode, frame_length
from megatronapp_common.frames import decode as decoded
from megatronapp_trainer.scope.publisher import MOST_JOBS, Publisher, Ready

HELLO = Frame(FrameType.SCOPE_PUBLISHER, {"rank": 3})
BODY = 100 << 10


@pytest.fixture
def path() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        yield pathlib.Path(folder) / "scope.sock"


def listening(path: pathlib.Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(20)
    return listener


def accepted(listener: socket.socket) -> socket.socket:
    peer, _ = listener.accept()
    peer.settimeout(20)
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


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def publisher(path: pathlib.Path) -> Iterator[Publisher]:
    one = Publisher(path, HELLO, bound_bytes=1 << 20)
    one.start()
    yield one
    one.close()


def test_frames_come_in_order_behind_who_sends_them(path: pathlib.Path, publisher: Publisher) -> None:
    with listening(path) as listener:
        publisher.post(Ready([part(0), part(1)]))
        with accepted(listener) as peer:
            assert read(peer).header == {"rank": 3}
            publisher.post(Ready([part(2)]))
            assert [read(peer).header["step"] for _ in range(3)] == [0, 1, 2]
    assert publisher.dropped == 0


def test_a_peer_that_does_not_read_costs_the_oldest_parts(path: pathlib.Path, publisher: Publisher) -> None:
    with listening(path) as listener:
        peer = accepted(listener)
        publisher.post(Ready([Frame(FrameType.SCOPE_TOKENS, {"step": 0})]))
        for number in range(40):
            publisher.post(Ready([part(number)]))
        until(lambda: publisher.dropped > 0 and not publisher._jobs)
        assert publisher.held_bytes <= 1 << 20
        with peer:
            assert read(peer).header == {"rank": 3}
            assert read(peer).header == {"step": 0}
            kept = [read(peer).header["step"] for _ in range(40 - publisher.dropped)]
        assert kept == sorted(kept)
        assert kept[-1] == 39


def test_a_peer_that_dies_is_found_again(path: pathlib.Path, publisher: Publisher) -> None:
    with listening(path) as listener:
        with accepted(listener) as peer:
            read(peer)
        for number in range(3):  # some of them may go to the dead peer
            publisher.post(Ready([part(number)]))
        with accepted(listener) as peer:
            assert read(peer).header == {"rank": 3}
            publisher.post(Ready([part(9)]))
            steps = [read(peer).header["step"]]
            while steps[-1] != 9:
                steps.append(read(peer).header["step"])
        assert steps == sorted(steps)


def test_nobody_there(path: pathlib.Path, publisher: Publisher) -> None:
    for number in range(40):
        publisher.post(Ready([part(number)]))
    until(lambda: not publisher._jobs)
    assert publisher.held_bytes <= 1 << 20
    assert publisher.dropped >= 40 - (1 << 20) // BODY
    with listening(path) as listener, accepted(listener) as peer:
        assert read(peer).header == {"rank": 3}
        assert read(peer).header["step"] == publisher.dropped


def test_steps_that_never_come_are_bounded(publisher: Publisher) -> None:
    class Late:
        def ready(self) -> bool:
            return False

        def build(self) -> list[Frame]:
            raise AssertionError

    for _ in range(MOST_JOBS + 5):
        publisher.post(Late())
    assert publisher.dropped == 5
    publisher._jobs.clear()


def test_what_cannot_be_told_is_counted_and_said(path: pathlib.Path, publisher: Publisher) -> None:
    class Broken:
        def ready(self) -> bool:
            return True

        def build(self) -> list[Frame]:
            raise ValueError("no such row")

    publisher.post(Broken())
    with listening(path) as listener, accepted(listener) as peer:
        publisher.post(Ready([part(1)]))
        read(peer)
        assert read(peer).header == {"step": 1}
    assert list(publisher.failures) == ["no such row"]
    assert publisher.dropped == 1


def test_the_end_sends_what_is_left(path: pathlib.Path) -> None:
    with listening(path) as listener:
        one = Publisher(path, HELLO)
        one.start()
        one.post(Ready([part(number) for number in range(5)]))
        peer = accepted(listener)
        with peer:
            assert read(peer).header == {"rank": 3}
            closing = threading.Thread(target=one.close, kwargs={"timeout_s": 20})
            closing.start()
            assert [read(peer).header["step"] for _ in range(5)] == list(range(5))
            assert peer.recv(1) == b""
            closing.join()
    assert len(encode(HELLO)) % 8 == 0
