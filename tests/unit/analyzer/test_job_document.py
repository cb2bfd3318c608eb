"""Ranks as the hub writes them without a model of each: what the models of the interface would write."""

import pydantic_core
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.hub.http import schemas, views
from megatronapp_analyzer.hub.ingest.ring_metadata import RankRing
from megatronapp_analyzer.hub.state.ranks import RankState, RankStatus
from megatronapp_analyzer.model import CurrentSpan, RankLiveness
from megatronapp_common.topology import Coordinates, RankRole
from megatronapp_common.trace import NO_MICROBATCH, RecordKind

NS = st.integers(0, 2**63)
rings = st.builds(
    RankRing,
    attempt=st.just(0),
    rank=st.integers(0, 9),
    local_rank=st.integers(0, 9),
    worker=st.integers(0, 9),
    node=st.text(max_size=5),
    world=st.just(10),
    role=st.sampled_from(RankRole),
    layout=st.just({}),
    coordinates=st.builds(Coordinates, **dict.fromkeys(("tp", "cp", "ep", "dp", "pp"), st.integers(0, 9))),
    comms=st.just({}),
    device=st.text(max_size=5),
    boot_id=st.just(""),
    real_offset_ns=st.just(0),
)
spans = st.none() | st.builds(
    CurrentSpan,
    kind=st.sampled_from([*map(int, RecordKind), 250]),
    step=st.integers(0, 99),
    microbatch=st.sampled_from([0, 7, NO_MICROBATCH]),
    start_ns=NS,
)
statuses = st.none() | st.builds(
    RankStatus,
    liveness=st.builds(
        RankLiveness,
        rank=st.just(0),
        alive=st.booleans(),
        closed=st.booleans(),
        heartbeat_ns=NS,
        now_ns=NS,
        open_span=spans,
    ),
    lost=st.just(0),
    received_ns=NS,
)


@given(rings, st.sampled_from(RankState), statuses, st.none() | st.integers(0, 99))
def test_an_entry_is_what_the_model_of_the_interface_writes(
    ring: RankRing, state: RankState, status: RankStatus | None, step: int | None
) -> None:
    entry = views.rank_entry(ring, state, status, step)
    model = schemas.RankView.model_validate(entry)
    assert list(model.model_dump().items()) == list(entry.items())
    assert model.model_dump_json().encode() == pydantic_core.to_json(entry)
    assert (entry["openSpan"] is not None) == bool(
        status and status.liveness.open_span and status.liveness.alive and not status.liveness.closed
    )
    # Frames of MessagePack take these types only.
    assert all(type(value) in (int, str, dict, type(None)) for value in entry.values())
