"""Figures of forward and backward ranks from the records of steps: balance, passes, waits, shipments; their metrics."""

import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.graph.deciding_part import replica_of_rank
from megatronapp_analyzer.hub.export.chrome import chrome_trace
from megatronapp_analyzer.hub.export.tracks import source_of, tracks_of
from megatronapp_analyzer.hub.http import schemas, views
from megatronapp_analyzer.hub.http.pipeline_view import choose_steps
from megatronapp_analyzer.hub.http.role_view import forward_backward_view
from megatronapp_analyzer.hub.http.schemas import ForwardBackwardView
from megatronapp_analyzer.hub.http.timeline.views import timeline
from megatronapp_analyzer.hub.ingest.digest import StepDigest
from megatronapp_analyzer.hub.ingest.pipeline_passes import pipeline_passes, transfers_of
from megatronapp_analyzer.hub.ingest.role_passes import RolePasses, role_passes, shipments
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.metrics import build_registry
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_analyzer.hub.state.agent_link import AgentLink
from megatronapp_analyzer.hub.state.progress import ForwardBackward, Progress
from megatronapp_analyzer.model import RANK_RECORD, Communicator, JobLayout, StepRecords
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.topology import Coordinates, FbdWorld, RankRole, fbd_world
from megatronapp_common.trace import Flag, RecordKind, TransferPath

MS = 1_000_000
UNIT = 8
BACK, FORTH = 0, 1
"""Slots of the pairs (backward, forward) and (forward, backward)."""
LAYOUT = JobLayout(
    dp=2,
    coordinates=tuple(Coordinates(tp=0, cp=0, ep=0, dp=dp, pp=0) for dp in (0, 1, 0)),
    workers=(0, 0, 0),
    nodes=("n", "n", "n"),
    roles=(RankRole.BACKWARD, RankRole.BACKWARD, RankRole.FORWARD),
)
"""Ranks 0 and 1 run backward passes, rank 2 the forward passes of both."""
Span = tuple[int, int, int, int, int]
"""Rank, kind, microbatch, start and length in ns."""


def stored(spans: Sequence[Span], *, offsets: tuple[int, ...] = (0, 0, 0)) -> StoredStep:
    records = np.zeros(len(spans), RANK_RECORD)
    for row, (rank, kind, microbatch, start_ns, length_ns) in zip(records, spans, strict=True):
        row["rank"], row["kind"], row["microbatch"] = rank, kind, microbatch
        row["start_ns"], row["duration"] = start_ns, length_ns // UNIT
    comms = {rank: {BACK: Communicator("p2p", (0, 2)), FORTH: Communicator("p2p", (2, 0))} for rank in (0, 1, 2)}
    view = StepRecords(attempt=0, step=3, records=records, comms=comms)
    values = np.zeros((4, 3), "f4")
    digest = StepDigest(attempt=0, step=3, start_real_ns=0, duration_ns=0, complete=True, values=values)
    return StoredStep(view=view, digest=digest, offsets_ns=np.array(offsets, np.int64))


def figures(step: StoredStep) -> RolePasses:
    found = role_passes(step, LAYOUT)
    assert found is not None
    return found


def test_weight_gradients_count_as_backward_and_forward_ranks_count_the_microbatches_of_all_replicas() -> None:
    spans = [
        (2, RecordKind.FORWARD, 0, 0, 2 * MS),
        (2, RecordKind.FORWARD, 1, 3 * MS, 2 * MS),
        (0, RecordKind.BACKWARD, 0, 1002 * MS, 3 * MS),
        (0, RecordKind.WEIGHT, 0, 1006 * MS, 1 * MS),
        (1, RecordKind.BACKWARD, 0, 5 * MS, 5 * MS),
        (0, RecordKind.OPTIMIZER, 0xFFFF, 1010 * MS, 50 * MS),
    ]
    found = figures(stored(spans, offsets=(-1000 * MS, 0, 0)))
    assert found.seconds == pytest.approx(0.010)
    assert found.busy == pytest.approx([0.4, 0.5, 0.4])
    assert found.pass_seconds == pytest.approx([0.004, 0.005, 0.002])
    assert found.wait_seconds == pytest.approx([0, 0, 0])


def layout_of(world: FbdWorld) -> JobLayout:
    ranks = range(world.world_size)
    roles = tuple(world.role_of(rank) for rank in ranks)
    return JobLayout(
        tp=world.trained.tensor,
        pp=world.trained.pipeline,
        dp=world.trained.data,
        coordinates=tuple(
            world.topology_of(role).coordinates(world.role_rank(rank)) for rank, role in zip(ranks, roles, strict=True)
        ),
        workers=(0,) * len(ranks),
        nodes=("n",) * len(ranks),
        roles=roles,
    )


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("sizes", "merged", "served"),
    [((1, 2, 4), False, 2), ((2, 2, 6), False, 3), ((2, 2, 3), True, 1), ((2, 1, 2), False, 2), ((2, 2, 2), False, 1)],
)
def test_partners_are_in_a_pipeline(sizes: tuple[int, int, int], merged: bool, served: int, apart: bool) -> None:
    tensor, pipeline, data = sizes
    world = fbd_world(
        tensor=tensor, pipeline=pipeline, data=data, merged=merged, backward_per_forward=served, apart=apart
    )
    layout = layout_of(world)
    places = layout.pipeline_places
    for rank in range(world.world_size):
        assert {places[partner] for partner in world.partners(rank)} == {places[rank]}
    assert len(set(places)) == world.forward_ranks // pipeline
    if world.served == 1:
        assert places == tuple((at.tp, at.cp, at.dp) for at in layout.coordinates)


def test_a_pipeline_ends_with_the_backward_ranks_of_its_own_forward_rank() -> None:
    """Forward replica 1 serves the backward replicas 2 and 3: its first pass begins theirs, and not that of 0 and 1."""
    layout = layout_of(fbd_world(tensor=1, pipeline=1, data=4, backward_per_forward=2, apart=True))
    spans = [
        (4, RecordKind.FORWARD, 0, 0, 2 * MS),
        (0, RecordKind.BACKWARD, 0, 2 * MS, 2 * MS),
        (1, RecordKind.BACKWARD, 0, 2 * MS, 2 * MS),
        (5, RecordKind.FORWARD, 0, 100 * MS, 2 * MS),
        (2, RecordKind.BACKWARD, 0, 102 * MS, 2 * MS),
        (3, RecordKind.BACKWARD, 0, 102 * MS, 8 * MS),
    ]
    found = pipeline_passes(stored(spans, offsets=(0,) * 6), layout)
    assert found is not None and found.seconds == pytest.approx(0.010)
    assert found.bubble == pytest.approx([0.5, 0.5, 0.8, 0.2, 0.5, 0.8])


def test_replicas_that_a_forward_rank_serves_are_replayed_together() -> None:
    layout = layout_of(fbd_world(tensor=2, pipeline=1, data=4, backward_per_forward=2, apart=True))
    assert replica_of_rank(layout).tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1]
    assert replica_of_rank(JobLayout.grid(tp=2, dp=2, pp=2)).tolist() == [0, 0, 1, 1] * 2


def test_waits_are_those_for_the_other_role() -> None:
    spans = [
        (2, RecordKind.FORWARD, 0, 0, 2 * MS),
        (0, RecordKind.BACKWARD, 0, 5 * MS, 3 * MS),
        (0, RecordKind.RECV_WAIT, 0, 2 * MS, 3 * MS),
        (2, RecordKind.RECV_WAIT, 0, 2 * MS, 4 * MS),
        (0, RecordKind.RECV_WAIT, 1, 8 * MS, 6 * MS),
    ]
    step = stored(spans)
    step.view.records["comm"][2:] = [FORTH, BACK, 7]
    step.view.comms[0][7] = Communicator("p2p", (1, 0))  # type: ignore[index]
    found = figures(step)
    assert found.wait_seconds[[0, 2]] == pytest.approx([0.003, 0.004])
    assert math.isnan(found.wait_seconds[1])


def test_shipments_are_transfers_from_forward_to_backward_ranks() -> None:
    step = stored([(rank, RecordKind.COPY, 0, MS, 2 * MS) for rank in (0, 0, 2, 0)])
    step.view.records["comm"] = [FORTH, FORTH, BACK, 7]
    step.view.records["aux"] = [64, 32, 0, 16]
    step.view.comms[0][7] = Communicator("p2p", (1, 0))  # type: ignore[index]
    (found,) = shipments(transfers_of(step), LAYOUT)
    assert (found.source, found.destination, found.path) == (2, 0, TransferPath.SHARED_MEMORY)
    assert (found.count, found.size_bytes) == (2, 96 * 16)
    assert found.seconds == pytest.approx(0.004)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 10_000), st.integers(1, 10_000)),
        min_size=1,
        max_size=30,
    )
)
def test_figures_are_sums_over_the_passes_of_a_rank(spans: list[tuple[int, int, int, int]]) -> None:
    kinds = {0: RecordKind.BACKWARD, 1: RecordKind.WEIGHT, 2: RecordKind.FORWARD}
    found = figures(stored([(r, kinds[r], m, s * UNIT, d * UNIT) for r, m, s, d in spans]))
    length = max(s + d for _, _, s, d in spans) - min(s for _, _, s, _ in spans)
    assert found.seconds == pytest.approx(length * UNIT * 1e-9)
    for rank in range(3):
        own = [span for span in spans if span[0] == rank]
        if not own:
            assert np.isnan([found.busy[rank], found.pass_seconds[rank], found.wait_seconds[rank]]).all()
            continue
        total = sum(d for _, _, _, d in own)
        assert found.busy[rank] == pytest.approx(min(1.0, total / length))
        assert found.pass_seconds[rank] == pytest.approx(total * UNIT * 1e-9 / len({m for _, m, _, _ in own}))


def test_steps_without_passes_or_roles_or_with_unknown_ranks_have_no_figures() -> None:
    assert role_passes(stored([(0, RecordKind.STEP, 0, 0, MS)]), LAYOUT) is None
    assert role_passes(stored([(0, RecordKind.FORWARD, 0, 0, MS)]), JobLayout.grid(dp=3)) is None
    assert role_passes(stored([(3, RecordKind.FORWARD, 0, 0, MS)]), LAYOUT) is None


@pytest.fixture
def hub(ring_header: Any, rows: Callable[..., np.ndarray]) -> Hub:
    """A hub of eight steps of a backward rank (0) and a forward rank (1), which publish their state."""
    hub = Hub(HubSettings(job=JobIdentity(name="demo", uid="uid-1"), state_dir=None), LocalJudge(Detector))
    links = [AgentLink(attempt=0, worker=rank, node=f"n{rank}") for rank in (0, 1)]
    for link, role in zip(links, ("backward", "forward"), strict=True):
        ring = ring_header(link.worker)
        ring["metadata"] |= {"role": role, "layout": {"tensor": 1, "pipeline": 1, "data": 1}}
        ring["metadata"]["coordinates"]["pp"] = 0
        hub.take_frame(link, Frame(FrameType.RING, ring), b"")
    first = [0, 0]
    for step in range(8):
        start = 100 * step * MS
        for rank, link in enumerate(links):
            own, length_ms, wait_ms = (RecordKind.FORWARD, 2, 1) if rank else (RecordKind.BACKWARD, 4, 3)
            entries = [
                {"kind": own, "start_ns": start + 5 * MS * (1 - rank), "duration": length_ms * MS // UNIT},
                {"kind": RecordKind.RECV_WAIT, "comm": 1 - rank, "start_ns": start, "duration": wait_ms * MS // UNIT},
                {"kind": RecordKind.STEP, "start_ns": start, "duration": 10 * MS // UNIT},
            ]
            if not rank:
                copy = {"kind": RecordKind.COPY, "comm": 1, "aux": 256, "flags": Flag.AUX_BYTES}
                entries.append(copy | {"start_ns": start + 2 * MS, "duration": MS // UNIT})
            records = rows(entries)
            records["step"] = step
            header = {"rank": rank, "worker": rank, "first": first[rank], "lost": 0}
            hub.take_frame(link, Frame(FrameType.RECORDS, header, records.tobytes()), b"")
            first[rank] += len(records)
    state = ForwardBackward(from_step=0, ship="full", backward_per_forward=1, ship_bytes=4096)
    hub.ranks.progress = Progress(attempt=0, iteration=7, forward_backward=state)
    return hub


def view_of(hub: Hub, first: int | None = None, last: int | None = None) -> ForwardBackwardView:
    return forward_backward_view(choose_steps(hub, first, last), hub.ranks.forward_backward(), hub.roles, hub.passes)


def test_the_view_has_both_roles_their_steps_and_shipments(hub: Hub) -> None:
    view = view_of(hub)
    forward, backward = view.roles
    assert (forward.role, forward.ranks, backward.role, backward.ranks) == ("forward", [1], "backward", [0])
    assert (view.steps, view.role_steps) == (list(range(8)), 8)
    assert view.seconds == pytest.approx([0.009] * 8)
    assert [forward.busy, backward.busy] == pytest.approx([2 / 9, 4 / 9])
    assert (forward.pass_seconds, backward.pass_seconds) == (0.002, 0.004)
    assert (forward.wait_seconds, backward.wait_seconds) == (0.001, 0.003)
    assert (view.credit_wait_seconds[0], view.shipment_wait_seconds[0]) == (0.001, 0.003)
    assert view.state is not None
    assert view.state.ship == "full"
    (pair,) = view.transfers
    assert (pair.source, pair.destination, pair.path, pair.bytes) == (1, 0, "shared-memory", 8 * 4096)
    assert view_of(hub, 5, 6).steps == [5, 6]


def test_a_state_of_an_older_attempt_is_not_shown(hub: Hub) -> None:
    progress = hub.ranks.progress
    assert progress is not None
    hub.ranks.progress = progress.model_copy(update={"attempt": 1})
    assert view_of(hub).state is None
    assert "megafbd_ship_info{" not in generate_latest(build_registry(hub)).decode()


def test_metrics_are_of_both_roles(hub: Hub) -> None:
    text = generate_latest(build_registry(hub)).decode()
    for line in (
        'megafbd_ship_info{job_id="demo",ship="full"} 1.0',
        'megafbd_backward_per_forward_ratio{job_id="demo"} 1.0',
        'megafbd_microbatch_shipment_bytes{job_id="demo"} 4096.0',
        'megafbd_microbatch_passes_seconds{job_id="demo",role="forward"} 0.002',
        'megafbd_microbatch_passes_seconds{job_id="demo",role="backward"} 0.004',
        'megafbd_step_wait_seconds{job_id="demo",role="backward"} 0.003',
        'megafbd_step_shipment_bytes{job_id="demo",path="shared-memory"} 4096.0',
        'megafbd_shipment_bytes_per_second{job_id="demo",path="shared-memory"} 4.096e+06',
    ):
        assert line in text
    assert f'megafbd_busy_ratio{{job_id="demo",role="forward"}} {2 / 9}'[:60] in text
    dashboard = (pathlib.Path(__file__).parents[3] / "charts/megatronapp/dashboards/job.json").read_text()
    drawn = set(re.findall(r"megafbd_\w+", dashboard))
    assert len(drawn) == 5
    assert all(f"{name}{{" in text for name in drawn)


def test_timeline_and_trace_have_the_roles_of_ranks(hub: Hub) -> None:
    state, step = hub.ingest.newest, hub.ingest.store.find(3, None)
    assert state is not None
    assert step is not None
    assert timeline(step, state.layout).roles == ["backward", "forward"]
    document = views.job_document(hub)
    assert [rank["role"] for rank in document["ranks"]] == ["backward", "forward"]
    model = schemas.JobView.model_validate(document)
    assert list(model.model_dump().items()) == list(document.items())
    assert model.model_dump_json(exclude={"server_time"}) == pydantic_core.to_json(views.snapshot(hub)).decode()
    events = chrome_trace(tracks_of(source_of(hub.ingest, "demo", [step])))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names >= {"backward rank 0 (pp 0, dp 0, tp 0) host", "forward rank 1 (pp 0, dp 0, tp 0) host"}
