"""Figures of a step's pipeline from its records: length, idle shares, early passes, transfers by path; and plans."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.http.pipeline_view import choose_steps, pipeline_view
from megatronapp_analyzer.hub.ingest.digest import StepDigest
from megatronapp_analyzer.hub.ingest.pipeline_passes import (
    FIRST_STEPS,
    PassesCache,
    PipelinePasses,
    pipeline_passes,
    sum_transfers,
    transfers_of,
)
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.judge.links import LocalJudge
from megatronapp_analyzer.hub.metrics import build_registry
from megatronapp_analyzer.hub.service import Hub
from megatronapp_analyzer.hub.settings import HubSettings, JobIdentity
from megatronapp_analyzer.hub.state.agent_link import AgentLink
from megatronapp_analyzer.hub.state.progress import PipelinePlan, Progress
from megatronapp_analyzer.model import RANK_RECORD, Communicator, JobLayout, StepRecords
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.trace import Flag, PassFlag, RecordKind, TransferPath

MS = 1_000_000
UNIT = 8
PAIRS = {0: Communicator("p2p", (0, 1)), 1: Communicator("p2p", (1, 0))}
Span = tuple[int, int, int, int]
"""Rank, kind, start and length in ns."""


def stored(
    spans: Sequence[Span], *, number: int = 3, flags: list[int] | None = None, offsets: tuple[int, ...] = (0, 0, 0, 0)
) -> StoredStep:
    records = np.zeros(len(spans), RANK_RECORD)
    for row, (rank, kind, start_ns, length_ns) in zip(records, spans, strict=True):
        row["rank"], row["kind"], row["start_ns"], row["duration"] = rank, kind, start_ns, length_ns // UNIT
    if flags is not None:
        records["flags"] = flags
    view = StepRecords(attempt=0, step=number, records=records, comms={rank: PAIRS for rank in range(4)})
    values = np.zeros((4, 4), "f4")
    digest = StepDigest(attempt=0, step=number, start_real_ns=0, duration_ns=0, complete=True, values=values)
    return StoredStep(view=view, digest=digest, offsets_ns=np.array(offsets, np.int64))


def figures(step: StoredStep, layout: JobLayout) -> PipelinePasses:
    found = pipeline_passes(step, layout)
    assert found is not None
    return found


def test_each_pipeline_has_its_own_length_on_aligned_clocks() -> None:
    layout = JobLayout.grid(pp=2, dp=2)  # pipelines of ranks 0, 2 and 1, 3
    spans = [
        (0, RecordKind.FORWARD, 10 * MS, 2 * MS),
        (0, RecordKind.BACKWARD, 18 * MS, 2 * MS),
        (2, RecordKind.FORWARD, 1012 * MS, 5 * MS),
        (1, RecordKind.FORWARD, 10 * MS, 4 * MS),
        (3, RecordKind.WEIGHT, 1014 * MS, 1 * MS),
        (3, RecordKind.OPTIMIZER, 1020 * MS, 50 * MS),
    ]
    found = figures(stored(spans, offsets=(0, 0, -1000 * MS, -1000 * MS)), layout)
    assert found.seconds == pytest.approx(0.010)
    assert found.bubble == pytest.approx([0.6, 0.2, 0.5, 0.8])
    assert (found.count, found.early) == (5, 0)


def test_early_passes_are_not_skipped_updates() -> None:
    """STEP records use the bit of EARLY for skipped updates."""
    spans = [
        (0, RecordKind.FORWARD, 0, MS),
        (1, RecordKind.FORWARD, 0, MS),
        (1, RecordKind.STEP, 0, 5 * MS),
    ]
    found = figures(stored(spans, flags=[PassFlag.EARLY, 0, Flag.SKIPPED_UPDATE]), JobLayout.grid(pp=2))
    assert (found.early, found.count) == (1, 2)


def test_transfers_are_summed_by_pair_and_path() -> None:
    spans = [(rank, RecordKind.COPY, at * MS, at * MS) for rank, at in ((1, 1), (1, 2), (0, 3), (1, 4))]
    step = stored([(0, RecordKind.FORWARD, 0, MS), *spans])
    step.view.records["comm"][1:] = [0, 0, 1, 0]
    step.view.records["aux"][1:] = [64, 64, 32, 16]
    step.view.records["layer"][1:] = [0, 0, 0, TransferPath.UCX]
    found = transfers_of(step)
    totals = [(pair.source, pair.destination, pair.path, pair.count, pair.size_bytes) for pair in found]
    assert totals == [(0, 1, 0, 2, 2048), (0, 1, 2, 1, 256), (1, 0, 0, 1, 512)]
    assert found[0].seconds == pytest.approx(0.003)
    twice = sum_transfers([found, found])
    assert [(pair.count, pair.size_bytes) for pair in twice] == [(4, 4096), (2, 512), (2, 1024)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10_000), st.integers(1, 10_000)), min_size=1, max_size=30))
def test_bubbles_are_ratios_of_the_length_of_the_pipeline(spans: list[tuple[int, int, int]]) -> None:
    layout = JobLayout.grid(pp=2, dp=2)
    found = figures(stored([(r, RecordKind.FORWARD, s * UNIT, d * UNIT) for r, s, d in spans]), layout)
    for rank in range(4):
        own = [span for span in spans if span[0] == rank]
        if not own:
            assert np.isnan(found.bubble[rank])
            continue
        group = [span for span in spans if span[0] % 2 == rank % 2]
        length = max(s + d for _, s, d in group) - min(s for _, s, _ in group)
        assert found.bubble[rank] == pytest.approx(max(0.0, 1 - sum(d for _, _, d in own) / length), abs=1e-6)


def test_steps_without_passes_or_with_unknown_ranks_have_no_figures() -> None:
    assert pipeline_passes(stored([(0, RecordKind.STEP, 0, MS)]), JobLayout.grid(pp=2)) is None
    assert transfers_of(stored([(0, RecordKind.STEP, 0, MS)])) == ()
    assert pipeline_passes(stored([(3, RecordKind.FORWARD, 0, MS)]), JobLayout.grid(pp=2)) is None


def test_figures_take_bounded_memory() -> None:
    cache, layout = PassesCache(limit_bytes=6000), JobLayout.grid(pp=2)
    steps = []
    for number in range(40):
        step = stored([(0, RecordKind.FORWARD, 0, MS), (1, RecordKind.COPY, 0, MS)], number=number)
        step.view.records["aux"] = 64
        steps.append(step)
    for _ in range(2):
        assert [passes.step for passes in cache.figures(steps, layout)] == list(range(40))
        assert 0 < cache.bytes <= 6000
        assert [(pair.source, pair.destination, pair.count) for pair in cache.transfers(steps)] == [(0, 1, 16)]


@pytest.fixture
def make_hub(ring_header: Any, step_rows: Any) -> Callable[[int], Hub]:
    """Return a function that makes a hub of the first steps; under the plan in force, from step 5 on, they take longer.

    Both plans are published after step 6.
    """
    plan = PipelinePlan(from_step=0, schedule="auto", plan="as measured", microbatches=8, chunks=1, cap_chunks=4)
    chosen = plan.model_copy(
        update={"from_step": 5, "plan": "order of megatron-core", "chosen": True, "simulated_seconds": 0.004}
    )

    def make(steps: int) -> Hub:
        hub = Hub(HubSettings(job=JobIdentity(name="demo", uid="uid-1"), state_dir=None), LocalJudge(Detector))
        links = [AgentLink(attempt=0, worker=rank, node=f"n{rank}") for rank in (0, 1)]
        first = [0, 0]
        for link in links:
            ring = ring_header(link.worker)
            ring["metadata"]["totalIterations"] = max(steps, 100)
            hub.take_frame(link, Frame(FrameType.RING, ring), b"")
        for step in range(steps):
            for rank, link in enumerate(links):
                rows = step_rows(rank, step, compute_ms=1.0 if step < 5 else 2.0)
                if step == 6 and rank:
                    rows["flags"][rows["kind"] == RecordKind.FORWARD] = PassFlag.EARLY
                header = {"rank": rank, "worker": rank, "first": first[rank], "lost": 0}
                hub.take_frame(link, Frame(FrameType.RECORDS, header, rows.tobytes()), b"")
                first[rank] += len(rows)
            if step == 6:
                hub.ranks.progress = Progress(attempt=0, iteration=7, plans=[plan, chosen])
        return hub

    return make


@pytest.fixture
def hub(make_hub: Callable[[int], Hub]) -> Hub:
    return make_hub(8)


def test_each_plan_has_what_its_steps_measured(hub: Hub) -> None:
    view = pipeline_view(choose_steps(hub, None, None), PassesCache())
    assert (view.attempt, view.stages, view.steps) == (0, 2, list(range(8)))
    before, after = view.plans
    assert (before.steps, after.steps, after.plan.chosen) == (5, 3, True)
    assert before.seconds == pytest.approx(0.007)
    assert after.seconds == pytest.approx(0.008)
    assert before.bubble == pytest.approx(1 - 2 / 7, abs=1e-4)
    assert after.rank_bubbles == pytest.approx([0.5, 0.5])
    assert after.early_per_step == pytest.approx(1 / 3)
    assert view.early == [0, 0, 0, 0, 0, 0, 1, 0]
    ranged = pipeline_view(choose_steps(hub, 5, 6), PassesCache())
    assert (ranged.steps, ranged.plans[0].steps, ranged.plans[0].seconds) == ([5, 6], 0, None)


def test_steps_before_the_choice_remain_in_a_long_job(make_hub: Callable[[int], Hub]) -> None:
    hub = make_hub(600)
    view = pipeline_view(choose_steps(hub, None, None), PassesCache())
    before, after = view.plans
    assert view.steps == list(range(100, 600))
    assert (before.steps, after.steps) == (5, 500 + FIRST_STEPS)
    assert before.seconds == pytest.approx(0.007)
    assert before.rank_bubbles == pytest.approx([1 - 2 / 7] * 2, abs=1e-4)
    ranged = pipeline_view(choose_steps(hub, 500, 599), PassesCache())
    assert [period.steps for period in ranged.plans] == [0, 100]


def test_plans_of_an_older_attempt_are_not_shown(hub: Hub) -> None:
    hub.ranks.progress = Progress(attempt=1, plans=[PipelinePlan(from_step=0, schedule="dfc", plan="any")])
    assert pipeline_view(choose_steps(hub, None, None), PassesCache()).plans == []
    assert "megadpp_plan_info{" not in generate_latest(build_registry(hub)).decode()


def test_labels_have_no_measured_times(hub: Hub) -> None:
    plan_text = "order of megatron-core, 2 chunks of memory to spare, launched for inputs up to {} late"
    plan = PipelinePlan(from_step=5, schedule="auto", plan=plan_text.format("1.27 ms"))
    hub.ranks.progress = Progress(attempt=0, plans=[plan])
    assert f'plan="{plan_text.format("some ms")}"' in generate_latest(build_registry(hub)).decode()


def test_metrics_are_of_the_steps_under_the_plan_in_force(hub: Hub) -> None:
    text = generate_latest(build_registry(hub)).decode()
    assert 'megadpp_plan_info{job_id="demo",plan="order of megatron-core",schedule="auto"} 1.0' in text
    assert 'megadpp_passes_seconds{job_id="demo"} 0.008' in text
    assert 'megadpp_simulated_passes_seconds{job_id="demo"} 0.004' in text
    assert 'megadpp_bubble_ratio{job_id="demo"} 0.5' in text
    assert f'megadpp_early_passes_ratio{{job_id="demo"}} {1 / 12}' in text
    assert 'megadpp_memory_cap_chunks{job_id="demo"} 4.0' in text
    assert "megadpp_static_passes_seconds{" not in text
