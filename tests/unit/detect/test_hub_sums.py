"""Sums of simulated steps that the hub exports to Prometheus."""

import dataclasses
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest

from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.waits import imposed_s as imposed_on_aligned_clocks
from megatronapp_analyzer.hub.ingest.digest import METRICS, StepDigest
from megatronapp_analyzer.hub.ingest.step_totals import imposed_s, overhead_ratio, skew_correlation
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.model import JobLayout, StepRecords
from megatronapp_common.trace import RecordKind

LAYOUT = JobLayout.grid(dp=2, pp=2, ranks_per_worker=2)


def stored(view: StepRecords, offsets_ns: Sequence[int] | None = None) -> StoredStep:
    digest = StepDigest(
        attempt=0,
        step=view.step,
        start_real_ns=0,
        duration_ns=view.end_ns - view.start_ns,
        complete=True,
        values=np.zeros((len(METRICS), LAYOUT.world), np.float32),
    )
    return StoredStep(view=view, digest=digest, offsets_ns=np.array(offsets_ns or [0] * LAYOUT.world, np.int64))


def simulated(sim: ModuleType, steps: int, **job: object) -> list[StoredStep]:
    simulator = sim.Simulator(sim.Job(layout=LAYOUT, microbatches=8, **job), 1)
    return [stored(view) for view in simulator.steps(1, steps)]


def test_overhead_is_records_times_cost_over_the_step(sim: ModuleType) -> None:
    (step,) = simulated(sim, 1)
    records = step.view.records
    of_rank = records[records["rank"] == 2]
    length_ns = 8 * int(of_rank["duration"][of_rank["kind"] == RecordKind.STEP][0])
    assert overhead_ratio([step], {2: 1500.0}) == pytest.approx(len(of_rank) * 1500 / length_ns)
    assert overhead_ratio([step], {}) is None
    assert overhead_ratio([], {2: 1500.0}) is None


def test_a_slow_rank_is_no_skew_of_data(sim: ModuleType) -> None:
    noise = dataclasses.replace(sim.QUIET, body=0.1)
    slow = (sim.Fault(rank=1, kind="compute", factor=3.0),)
    found = skew_correlation(simulated(sim, 12, noise=noise, faults=slow), ())
    assert found is not None
    assert abs(found) < 0.25


def test_uneven_microbatches_are_skew_of_data(sim: ModuleType) -> None:
    steps = []
    for step in simulated(sim, 4, noise=dataclasses.replace(sim.QUIET, body=0.05)):
        records = step.view.records.copy()
        passes = np.isin(records["kind"], [RecordKind.FORWARD, RecordKind.BACKWARD])
        records["duration"][passes] = records["duration"][passes] * (1 + 0.3 * records["microbatch"][passes])
        steps.append(stored(dataclasses.replace(step.view, records=records)))
    found = skew_correlation(steps, (3,))
    assert found is not None
    assert found > 0.9
    assert skew_correlation(steps, range(LAYOUT.world)) is None
    assert skew_correlation([], ()) is None


def test_the_slow_rank_makes_the_others_wait_whatever_the_clocks(sim: ModuleType) -> None:
    faults = (sim.Fault(rank=1, kind="compute", factor=3.0),)
    simulator = sim.Simulator(
        sim.Job(layout=LAYOUT, faults=faults, boot_per_node=True, clock_offset_s=5.0, microbatches=8), 3
    )
    view = simulator.step(1)
    offsets = [-round(simulator.offset[view.boot_ids[rank]] * 1e9) for rank in range(LAYOUT.world)]
    by_kind = imposed_s(stored(view, offsets))
    of_rank = {
        rank: sum(s for (waiting_rank, _), s in by_kind.items() if waiting_rank == rank) for rank in range(LAYOUT.world)
    }
    assert max(of_rank, key=lambda rank: of_rank[rank]) == 1
    assert {kind for rank, kind in by_kind if rank == 1} >= {"p2p", "dp"}
    straight = sim.Simulator(sim.Job(layout=LAYOUT, faults=faults, microbatches=8), 3).step(1)
    assert sum(by_kind.values()) == pytest.approx(
        sum(imposed_on_aligned_clocks(MatchedStep(straight)).values()), rel=0.05
    )
