"""Description of the hub and of the model's ranks when a page greets it."""

import dataclasses
from typing import Any

import pytest
import scope_session
from scope_model import TinyGptShape

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery import session_file
from megatronapp_analyzer.scope.delivery.session_file import RecordedSession
from megatronapp_analyzer.scope.delivery.viewer_feed import Viewer
from megatronapp_analyzer.scope.schemas import Hello
from megatronapp_analyzer.scope.session_player import SessionPlayer, settings_of
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.publishers import parse_publisher
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType

SHAPE = TinyGptShape()
UNEVEN = {0: [0, 1], 1: [0, 1], 2: [1, 4], 3: [1, 4]}
"""Layers of two stages of two ranks."""


def publisher(rank: int) -> Frame:
    frame = scope_session.publisher(SHAPE, rank, 2, 2)
    return dataclasses.replace(frame, header={**frame.header, "layers": UNEVEN[rank]})


def new_core() -> ScopeCore:
    return ScopeCore(ScopeSettings(job="tiny"), clock=lambda: 0.0)


def states(page: Viewer) -> list[dict[str, Any]]:
    """Headers of the STATE frames that a page has not read yet."""
    received: list[Frame] = []
    while sent := page.outbox.pop():
        received += [frames.decode(data) for data in sent]
    return [dict(frame.header) for frame in received if frame.type == FrameType.SCOPE_STATE]


def test_every_life_of_a_hub_has_its_own_boot() -> None:
    first, second = new_core(), new_core()
    assert (
        first.feed.hello("viewer")["boot"]
        == first.feed.hello("controller")["boot"]
        != second.feed.hello("viewer")["boot"]
    )


def test_layers_of_ranks_are_as_published_and_open_pages_receive_them() -> None:
    core = new_core()
    for rank in (0, 1, 3):
        core.ingest.take_frame(0, rank, publisher(rank))
    assert Hello.model_validate(core.feed.hello("viewer")).layout.ranks is None, "rank 2 has not begun"
    page = core.feed.subscribe()
    core.ingest.take_frame(0, 2, publisher(2))
    core.ingest.take_frame(0, 2, publisher(2))
    layout = Hello.model_validate(core.feed.hello("viewer")).layout
    assert layout.ranks is not None
    assert [(rank.rank, rank.stage, rank.tensor) for rank in layout.ranks] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    assert [list(rank.layers) for rank in layout.ranks] == [UNEVEN[rank] for rank in range(4)]
    assert [list(rank.heads) for rank in layout.ranks] == [[0, 2], [2, 4]] * 2
    layouts = [state["layout"] for state in states(page)]
    assert layouts == [layout.model_dump(mode="json", by_alias=True)], "once"


def test_pages_receive_the_layers_again_once_all_ranks_are_reconnected() -> None:
    core = new_core()
    for rank in range(4):
        core.ingest.take_frame(0, rank, publisher(rank))
    page = core.feed.subscribe()
    for rank in (2, 3):
        core.ingest.on_agent_lost(0, rank)
    for rank in (3, 2):
        core.ingest.take_frame(0, rank, publisher(rank))
    received = states(page)
    assert [(state["state"], "ranks" in state["layout"]) for state in received] == [
        ("restarting", False),
        ("ready", False),
        ("ready", True),
    ]
    assert [rank_layout["layers"] for rank_layout in received[-1]["layout"]["ranks"]] == [
        UNEVEN[rank] for rank in range(4)
    ]


def test_pages_receive_nothing_of_a_model_before_its_rank_0_is_connected() -> None:
    core = new_core()
    page = core.feed.subscribe()
    core.ingest.take_frame(0, 1, publisher(1))
    hello = Hello.model_validate(core.feed.hello("viewer"))
    assert (states(page), hello.state, hello.layout.ranks) == ([], "gone", None)
    core.ingest.take_frame(0, 0, publisher(0))
    (state,) = states(page)
    assert (state["state"], state["layout"]) == ("ready", {"tensor": 2, "pipeline": 2})


@pytest.mark.parametrize("wrong", [[0], [0, 1, 2], [2, 1], [-1, 1], "01", [0, True], [0.0, 1]])
def test_layers_that_are_none_are_refused(wrong: object) -> None:
    header = {**publisher(0).header, "layers": wrong}
    with pytest.raises(ProtocolError, match="layers is not"):
        parse_publisher(header, 0)


def test_recordings_of_older_hubs_play_and_newer_ones_keep_their_ranks() -> None:
    newer = session_file.parse(scope_session.session(scope_session.record(tokens=2)))
    hello = {**newer.frames[0].header}
    hello["layout"] = {
        **hello["layout"],
        "ranks": [{"rank": 0, "stage": 0, "tensor": 0, "layers": [0, 4], "heads": [0, 4]}],
    }
    older = {name: value for name, value in hello.items() if name != "boot"} | {"layout": {"tensor": 1, "pipeline": 1}}
    for header, ranks in ((hello, hello["layout"]["ranks"]), (older, None)):
        session = RecordedSession([Frame(FrameType.SCOPE_HELLO, header), *newer.frames[1:]], None)
        core = ScopeCore(settings_of(session))
        player = SessionPlayer(session, core)
        assert len(list(player.steps())) == 2 and player.left_out == 0
        replayed = core.feed.hello("viewer")
        assert Hello.model_validate(replayed).layout.tensor == 1 and replayed["layout"].get("ranks") == ranks
        assert replayed["boot"] == core.feed.boot
