"""The cost of a slowness in a large job, by the replicas that decide the step, against a replay of the whole step."""

import numpy as np
import pytest
from detect import noise
from detect.faults import parse
from detect.layout import Grid
from detect.simulation import JobSimulation, SimulatedJob

from megatronapp_analyzer.detect.effect import Remedy, seconds_lost
from megatronapp_analyzer.graph.build import build_matched
from megatronapp_analyzer.graph.deciding_part import LAST_OTHERS, LAST_SLOW, MOST_WHOLE, deciding_part
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.model import Cause, Communicator, StepRecords, SubjectType, VerdictSubject

GRID = Grid(dp=40, pp=2, ranks_per_worker=8, ranks_per_node=8)
REPLICA_OF_RANK = np.arange(GRID.world) % GRID.dp


def step_of(faults: str, grid: Grid = GRID) -> MatchedStep:
    job = SimulatedJob(grid=grid, noise=noise.GPU, microbatches=4, faults=parse(faults, grid))
    *_, trace = JobSimulation(job, 5, 3).traces()
    comms = {
        rank: {slot: Communicator(kind, members) for slot, (kind, members) in table.items()}
        for rank, table in grid.comms.items()
    }
    boot_ids = dict(enumerate(trace.boot_ids))
    return MatchedStep(StepRecords(attempt=0, step=2, records=trace.records, comms=comms, boot_ids=boot_ids))


def slow(ranks: tuple[int, ...], kind: SubjectType = SubjectType.RANK, factor: float = 1.5) -> Remedy:
    return Remedy(subject=VerdictSubject(type=kind, ranks=ranks), cause=Cause.COMPUTE, ratio=factor, excess_s=0.0)


@pytest.mark.parametrize(
    ("faults", "remedies"),
    [
        ("compute rank=7 factor=1.5", [slow((7,))]),
        ("compute rank=7 factor=1.5; compute rank=59 factor=1.5", [slow((7,)), slow((59,))]),
        ("compute stage=1 factor=1.5", [slow(GRID.ranks_of("stage", 1), SubjectType.STAGE)]),
        ("compute rank=7 factor=1.5; compute rank=20 factor=1.4", [slow((7,))]),
    ],
)
def test_few_replicas_give_the_cost_of_the_whole_step(faults: str, remedies: list[Remedy]) -> None:
    whole = step_of(faults)
    part = deciding_part(whole, REPLICA_OF_RANK, [remedy.subject.ranks for remedy in remedies])
    replicas = np.unique(REPLICA_OF_RANK[part.view.records["rank"]])
    assert LAST_OTHERS < len(replicas) <= 2 * (LAST_OTHERS + LAST_SLOW)
    expected = seconds_lost(build_matched(whole), remedies)
    graph = build_matched(part)
    assert graph.unmatched == 0
    step_s = float(np.ptp(whole.times_s[1]))
    assert expected.max() > 0.02 * step_s
    assert seconds_lost(graph, remedies) == pytest.approx(expected, abs=0.001 * step_s)


def test_small_jobs_and_most_replicas_are_replayed_whole() -> None:
    grid = Grid(dp=MOST_WHOLE)
    small = step_of("compute rank=3 factor=1.5", grid)
    assert deciding_part(small, np.arange(grid.world), [(3,)]) is small
    large = step_of("compute rank=3 factor=1.5")
    assert deciding_part(large, REPLICA_OF_RANK, [(rank,) for rank in range(14)]) is large
