"""Contents of a session file and messages of a page are bounded."""

from typing import Any

import pytest
import scope_session

from megatronapp_analyzer.errors import ProtocolError, SessionError
from megatronapp_analyzer.scope.delivery import page_socket
from megatronapp_analyzer.scope.delivery.session_file import RecordedSession
from megatronapp_analyzer.scope.session_player import settings_of
from megatronapp_common.frames import Frame, FrameType


def hello(model: dict[str, Any], ranks: int) -> RecordedSession:
    header = scope_session.core_of(scope_session.record(tokens=1)).feed.hello("viewer")
    rank_header = {"stage": 0, "tensor": 0, "layers": [0, 1], "heads": [0, 1]}
    layout = {"tensor": 1, "pipeline": 1, "ranks": [{"rank": rank, **rank_header} for rank in range(ranks)]}
    return RecordedSession(
        [Frame(FrameType.SCOPE_HELLO, header | {"model": header["model"] | model, "layout": layout})], None
    )


def test_sizes_that_no_page_can_draw_are_refused() -> None:
    assert settings_of(hello({"layers": 128, "heads": 128}, 64)).source == "replay"
    for model in ({"layers": 10**6}, {"heads": 10**6}, {"layers": 0}, {"heads": -1}):
        with pytest.raises(SessionError, match="layers of"):
            settings_of(hello(model, 1))
    with pytest.raises(SessionError, match="20000 ranks"):
        settings_of(hello({}, 20_000))


def test_a_message_of_another_type_is_refused() -> None:
    with pytest.raises(ProtocolError, match="'eval'"):
        page_socket._run_command(page_socket.parse_command('{"type": "eval"}'), None, None)  # type: ignore[arg-type]
