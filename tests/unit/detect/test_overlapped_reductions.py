"""Reductions of gradients that overlap with the last backward pass: fast replicas wait for the slow one inside it."""

import numpy as np
import pytest
from detect import noise
from detect.faults import parse
from detect.layout import Grid
from detect.protocol import NamedSubject
from detect.runner import run
from detect.simulation import JobSimulation, SimulatedJob
from detect.suite import LAYOUTS, DetectionCase

from megatronapp_analyzer.detect.effect import Remedy, seconds_lost
from megatronapp_analyzer.graph.build import StepGraph, build_matched
from megatronapp_analyzer.graph.deciding_part import LAST_OTHERS, LAST_SLOW, deciding_part
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.replay import replay
from megatronapp_analyzer.graph.waits import attribute
from megatronapp_analyzer.model import Cause, Communicator, StepRecords, SubjectType, VerdictSubject

FAULT = "compute rank=1 factor=1.5 from=14"


def job_of(
    grid: Grid, faults: str, *, microbatches: int, overlaps: bool = True, noise_model: noise.NoiseModel = noise.GPU
) -> SimulatedJob:
    return SimulatedJob(
        grid=grid,
        noise=noise_model,
        microbatches=microbatches,
        faults=parse(faults, grid),
        overlaps_reductions=overlaps,
    )


def last_step(job: SimulatedJob, steps: int, seed: int = 5) -> MatchedStep:
    *_, trace = JobSimulation(job, seed, steps).traces()
    comms = {
        rank: {slot: Communicator(kind, members) for slot, (kind, members) in table.items()}
        for rank, table in job.grid.comms.items()
    }
    boot_ids = dict(enumerate(trace.boot_ids))
    return MatchedStep(StepRecords(attempt=0, step=steps - 1, records=trace.records, comms=comms, boot_ids=boot_ids))


def graph_of(job: SimulatedJob, steps: int = 20) -> StepGraph:
    return build_matched(last_step(job, steps), unit_of_rank=np.arange(job.grid.world) // job.grid.tp)


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("layout", ["node: dp2", "node: dp2-pp2-tp2", "dp8"])
def test_the_slow_replica_is_named_alone_at_its_cost(layout: str, microbatches: int) -> None:
    grid = LAYOUTS[layout]
    job = job_of(grid, FAULT, microbatches=microbatches)
    case = DetectionCase(row="overlapped", layout=layout, job=job, seed=3, steps=40, faults=job.faults)
    window = run(case, ["ours"]).windows["ours"]
    assert {verdict.subject for verdicts in window.named.values() for verdict in verdicts} == {NamedSubject((1,))}
    (truth,) = window.truths
    (verdict,) = window.named[max(window.named)]
    assert verdict.cost_s == pytest.approx(truth.cost_s, rel=0.1)


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [("node: dp2", 1), ("node: dp2", 8), ("dp4-pp2", 1), ("dp4-pp2", 8), ("dp4-pp4-vpp2", 8)],
)
def test_a_replay_gives_the_recorded_step(layout: str, microbatches: int) -> None:
    grid = LAYOUTS[layout]
    graph = graph_of(job_of(grid, FAULT, microbatches=microbatches))
    assert len(graph.overlapped) > 0
    ends = replay(graph, graph.edges.weight)[1 : 2 * len(graph.spans) : 2]
    assert np.abs(ends - graph.end_s).max() < 1e-9


@pytest.mark.parametrize("microbatches", [1, 4])
def test_waits_inside_the_last_pass_have_the_slow_replica_as_their_cause(microbatches: int) -> None:
    grid = LAYOUTS["node: dp2"]
    job = job_of(grid, FAULT, microbatches=microbatches, noise_model=noise.QUIET)
    step = last_step(job, 20)
    assert len(build_matched(step).overlapped) == 0  # these are no devices
    graph = graph_of(job_of(grid, FAULT, microbatches=microbatches))
    waited = attribute(graph).imposed_by((1,))
    assert waited[0] == pytest.approx(0.5 * 3 * job.forward_s * microbatches, rel=0.2)


def test_without_overlap_nothing_waits_inside_passes() -> None:
    graph = graph_of(job_of(LAYOUTS["dp8"], FAULT, microbatches=4, overlaps=False))
    assert len(graph.overlapped) == 0


@pytest.mark.parametrize("microbatches", [1, 4])
def test_few_replicas_give_the_cost_of_the_whole_step(microbatches: int) -> None:
    grid = Grid(dp=40)
    whole = last_step(
        job_of(grid, "compute rank=7 factor=1.5; compute rank=20 factor=1.3", microbatches=microbatches), 3
    )
    subject = VerdictSubject(type=SubjectType.RANK, ranks=(7,))
    remedy = Remedy(subject=subject, cause=Cause.COMPUTE, ratio=1.5, excess_s=0.0)
    part = deciding_part(whole, np.arange(grid.world), [(7,)])
    assert len(np.unique(part.view.records["rank"])) <= LAST_OTHERS + LAST_SLOW
    expected = seconds_lost(build_matched(whole), [remedy])
    assert expected[0] > 0.02 * float(np.ptp(whole.times_s[1]))
    assert seconds_lost(build_matched(part), [remedy]) == pytest.approx(expected, rel=0.05)
