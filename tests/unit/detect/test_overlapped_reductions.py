"""Reductions of gradients that overlap with the last backward pass: fast replicas wait for the slow one inside it."""

import dataclasses

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
from megatronapp_analyzer.detect.features import extract_matched
from megatronapp_analyzer.graph.build import StepGraph, build_matched
from megatronapp_analyzer.graph.deciding_part import LAST_OTHERS, LAST_SLOW, deciding_part
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.replay import replay
from megatronapp_analyzer.graph.usual import PeerSet, find_slowdowns
from megatronapp_analyzer.graph.waits import attribute
from megatronapp_analyzer.model import Cause, Communicator, JobLayout, StepRecords, SubjectType, VerdictSubject
from megatronapp_common.trace import DURATION_UNIT_NS, RecordKind

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


def late_after_its_last_reduction(factor: float, microbatches: int, seed: int) -> tuple[MatchedStep, MatchedStep]:
    """Return a step in which fast replicas wait inside their last pass, and one in which that ends at the reduction.

    The second is as with a kernel after each pass of the slow replica: others have reduced before its last pass ends.
    """
    job = job_of(LAYOUTS["node: dp2"], f"compute rank=1 factor={factor}", microbatches=microbatches)
    step = last_step(job, 4, seed)
    records = step.view.records.copy()
    kind, fast = records["kind"], records["rank"] == 0
    backward = records["duration"][(kind == RecordKind.BACKWARD) & ~fast]
    reduced, norm = fast & (kind == RecordKind.GRAD_REDUCE), fast & (kind == RecordKind.GRAD_NORM)
    earlier = round((1.0 - 1.0 / factor) * float(np.median(backward)))
    records["duration"][np.flatnonzero(fast & (kind == RecordKind.BACKWARD))[-1]] -= earlier
    records["start_ns"][reduced | norm] -= np.uint64(earlier * DURATION_UNIT_NS)
    records["duration"][norm] += earlier
    return step, MatchedStep(dataclasses.replace(step.view, records=records))


@pytest.mark.parametrize("factor", [1.3, 1.6])
@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_what_delays_a_replica_after_its_last_reduction_hides_no_waits(
    microbatches: int, factor: float, seed: int
) -> None:
    step, late = late_after_its_last_reduction(factor, microbatches, seed)
    graph = build_matched(late)
    assert len(graph.overlapped) == 1
    waited_s = attribute(build_matched(step)).imposed_by((1,))[0]
    records = late.view.records
    reduced = (records["rank"] == 0) & (records["kind"] == RecordKind.GRAD_REDUCE)
    reduction_s = int(records["duration"][reduced][0]) * DURATION_UNIT_NS / 1e9  # which counts as a wait now
    assert attribute(graph).imposed_by((1,))[0] == pytest.approx(waited_s, rel=0.1, abs=1.5 * reduction_s)
    assert float(replay(graph, graph.edges.weight).max()) == pytest.approx(float(graph.end_s.max()), abs=1e-9)


def test_clocks_that_may_differ_by_more_prove_no_overlap() -> None:
    _, late = late_after_its_last_reduction(1.6, 1, 0)
    layout = JobLayout.grid(tp=1, pp=1, dp=2)
    sure, doubtful = (extract_matched(late, layout, tolerance_s=tolerance_s).passes_s for tolerance_s in (1e-3, 1.0))
    assert sure[0] < doubtful[0]
    assert sure[1] == doubtful[1]
    assert len(build_matched(late, tolerance_s=1.0).overlapped) == 0


@pytest.mark.parametrize("longer", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_long_last_pass_without_overlap_is_no_wait(longer: float, seed: int) -> None:
    step = last_step(job_of(LAYOUTS["node: dp2"], "compute rank=1 factor=1.3", microbatches=4, overlaps=False), 4, seed)
    records = step.view.records.copy()
    kind, fast = records["kind"], records["rank"] == 0
    last = np.flatnonzero(fast & (kind == RecordKind.BACKWARD))[-1]
    grown = round((longer - 1.0) * int(records["duration"][last]))
    reduced = fast & (kind == RecordKind.GRAD_REDUCE)
    records["duration"][last] += grown
    records["start_ns"][reduced] += np.uint64(grown * DURATION_UNIT_NS)
    records["duration"][reduced] -= grown
    graph = build_matched(MatchedStep(dataclasses.replace(step.view, records=records)))
    assert len(graph.overlapped) == 0


@pytest.mark.parametrize("microbatches", [1, 4])
def test_without_overlap_nothing_waits_inside_passes(microbatches: int) -> None:
    graph = graph_of(job_of(LAYOUTS["dp8"], FAULT, microbatches=microbatches, overlaps=False))
    assert len(graph.overlapped) == 0


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_replica_without_records_hides_no_waits_of_the_others(microbatches: int) -> None:
    whole = last_step(job_of(LAYOUTS["dp8"], FAULT, microbatches=microbatches), 20)
    records = whole.view.records
    found = build_matched(whole).overlapped
    left = MatchedStep(dataclasses.replace(whole.view, records=records[records["rank"] != 5]))
    assert len(build_matched(left).overlapped.waited_s) == len(found.waited_s) - 1


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("late_ns", [-2000, 200_000])
def test_of_reductions_of_several_groups_the_largest_counts(microbatches: int, late_ns: int) -> None:
    """Experts are reduced in groups of their own, before or after what all replicas have."""
    job = job_of(Grid(dp=4), "compute rank=1 factor=1.5", microbatches=microbatches)
    step = last_step(job, 4)
    records, comms = step.view.records, {rank: dict(table) for rank, table in step.view.comms.items()}
    experts = records[records["kind"] == RecordKind.GRAD_REDUCE].copy()
    experts["comm"], experts["duration"] = 7, 1
    experts["start_ns"] = experts["start_ns"].astype(np.int64) + late_ns
    for rank, table in comms.items():
        table[7] = Communicator("edp", (rank % 2, rank % 2 + 2))
    records = np.concatenate([records, experts])
    records = records[np.lexsort((records["start_ns"], records["rank"]))]
    graph = build_matched(MatchedStep(dataclasses.replace(step.view, records=records, comms=comms)))
    subject = VerdictSubject(type=SubjectType.RANK, ranks=(1,))
    remedy = Remedy(subject=subject, cause=Cause.COMPUTE, ratio=1.5, excess_s=0.0)
    healthy = JobSimulation(dataclasses.replace(job, faults=()), 5, 4).step_lengths_s()[3]
    true_s = JobSimulation(job, 5, 4).step_lengths_s()[3] - healthy
    assert seconds_lost(graph, [remedy])[0] == pytest.approx(true_s, rel=0.1)


@pytest.mark.parametrize("layout", ["node: dp2-pp2-tp2", "nodes: dp4-tp4"])
@pytest.mark.parametrize("faults", ["", FAULT])
def test_what_is_left_after_a_wait_is_no_usual_length_of_a_pass(layout: str, faults: str) -> None:
    grid = LAYOUTS[layout]
    steps = range(16, 22)
    graphs = [graph_of(job_of(grid, faults, microbatches=4), steps=step + 1) for step in steps]
    job_layout = JobLayout.grid(tp=grid.tp, pp=grid.pp, dp=grid.dp)
    lengths = [
        JobSimulation(job_of(grid, text, microbatches=4), 5, steps[-1] + 1).step_lengths_s()[steps[0] :].sum()
        for text in (faults, "")
    ]
    slowdown = find_slowdowns(graphs, job_layout, PeerSet.WORK).slowdown
    assert slowdown == pytest.approx(lengths[0] / lengths[1], rel=0.06)
    assert slowdown >= 1.0


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_few_replicas_give_the_cost_of_the_whole_step(microbatches: int, overlaps: bool, seed: int) -> None:
    grid = Grid(dp=40)
    faults = "compute rank=7 factor=1.5" if seed % 2 else "compute rank=7 factor=1.5; compute rank=20 factor=1.3"
    whole = last_step(job_of(grid, faults, microbatches=microbatches, overlaps=overlaps), 3, seed)
    subject = VerdictSubject(type=SubjectType.RANK, ranks=(7,))
    remedy = Remedy(subject=subject, cause=Cause.COMPUTE, ratio=1.5, excess_s=0.0)
    part = deciding_part(whole, np.arange(grid.world), [(7,)])
    assert len(np.unique(part.view.records["rank"])) <= 2 * (LAST_OTHERS + LAST_SLOW)
    expected = seconds_lost(build_matched(whole), [remedy])
    assert expected[0] > 0.02 * float(np.ptp(whole.times_s[1]))
    assert seconds_lost(build_matched(part), [remedy]) == pytest.approx(expected, rel=0.05)
