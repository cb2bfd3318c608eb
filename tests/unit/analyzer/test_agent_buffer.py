import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.agent.buffer import RecordsPacket, SendBuffer
from megatronapp_analyzer.agent.settings import AgentSettings
from megatronapp_analyzer.agent.uplink import backoff_s, parse_welcome
from megatronapp_analyzer.errors import ProtocolError
from megatronapp_common.frames import Frame, FrameType


def packet(first: int, count: int = 10, ring: int | None = 0) -> RecordsPacket:
    return RecordsPacket(ring=ring, first=first, end=first + count, data=bytes(count))


def send_all(buffer: SendBuffer) -> list[int]:
    sent = []
    while (head := buffer.peek()) is not None:
        sent.append(head.first)
        buffer.mark_sent(head)
    return sent


def test_packets_leave_in_order() -> None:
    buffer = SendBuffer(limit_bytes=1000, resend_bytes=1000)
    for first in (0, 10, 20):
        buffer.push(packet(first))
    assert send_all(buffer) == [0, 10, 20]
    assert buffer.buffered_bytes == 0


def test_oldest_are_dropped_and_counted() -> None:
    buffer = SendBuffer(limit_bytes=25, resend_bytes=0)
    for first in range(0, 50, 10):
        buffer.push(packet(first))
    assert buffer.dropped_records == 30
    assert send_all(buffer) == [30, 40]


def test_a_packet_dropped_while_it_was_being_sent_is_not_marked() -> None:
    buffer = SendBuffer(limit_bytes=10, resend_bytes=100)
    buffer.push(packet(0))
    head = buffer.peek()
    assert head is not None
    buffer.push(packet(10))
    buffer.mark_sent(head)
    assert send_all(buffer) == [10]


def test_rewind_sends_again_what_the_hub_lacks() -> None:
    buffer = SendBuffer(limit_bytes=1000, resend_bytes=1000)
    for first in (0, 10, 20):
        buffer.push(packet(first))
        buffer.push(packet(first, ring=None))
    send_all(buffer)
    buffer.push(packet(30))
    buffer.rewind({0: 15, None: 30})
    assert send_all(buffer) == [10, 20, 30]


def test_rewind_without_acknowledgement_resends_the_whole_buffer() -> None:
    buffer = SendBuffer(limit_bytes=1000, resend_bytes=20)
    for first in (0, 10, 20):
        buffer.push(packet(first))
    send_all(buffer)
    buffer.rewind({})
    assert send_all(buffer) == [10, 20]


@given(st.lists(st.one_of(st.integers(1, 30), st.just("send"), st.just("rewind")), max_size=60))
def test_memory_is_bounded_and_nothing_vanishes_uncounted(actions: list[int | str]) -> None:
    buffer = SendBuffer(limit_bytes=100, resend_bytes=60)
    pushed, left, next_index = 0, 0, 0
    for action in actions:
        if isinstance(action, int):
            buffer.push(packet(next_index, action))
            next_index += action
            pushed += action
        elif action == "send" and (head := buffer.peek()) is not None:
            buffer.mark_sent(head)
            left += head.end - head.first
        elif action == "rewind":
            buffer.rewind({0: next_index})
        assert buffer.buffered_bytes <= 100
        assert buffer.buffered_bytes + left + buffer.dropped_records == pushed


@pytest.fixture
def settings(tmp_path: object) -> AgentSettings:
    from pathlib import Path

    return AgentSettings(
        job="demo",
        uid="u",
        attempt=0,
        worker=0,
        node="",
        address="",
        shm_dir=Path(str(tmp_path)),
        shm_prefix="p",
        hub_url="http://127.0.0.1:8000/",
        token="t",
    )


def test_backoff_grows_to_its_limit(settings: AgentSettings) -> None:
    waits = [backoff_s(failures, settings, 1.0) for failures in range(40)]
    assert waits == sorted(waits)
    assert waits[0] == settings.backoff_min_s
    assert waits[30] == 1, "a hub that was restarted is back within half a minute"
    assert waits[-1] == settings.backoff_max_s
    assert backoff_s(3, settings, 0.0) == backoff_s(3, settings, 1.0) / 2


def test_socket_address(settings: AgentSettings) -> None:
    assert settings.socket_url == "ws://127.0.0.1:8000/api/v1/agent"


def test_welcome_frame_lists_the_rings_the_hub_already_has() -> None:
    header = {"server": "x", "rings": [{"rank": 3, "next": 7}, {"rank": None, "next": 1}]}
    assert parse_welcome(Frame(FrameType.WELCOME, header)) == {3: 7, None: 1}
    assert parse_welcome(Frame(FrameType.WELCOME, {"server": "older"})) == {}


def test_refusal_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="other job") as caught:
        parse_welcome(Frame(FrameType.ERROR, {"code": "other-job", "message": "other job", "hint": ""}))
    assert caught.value.code == "other-job"
    with pytest.raises(ProtocolError):
        parse_welcome(Frame(FrameType.STEPS, {}))
