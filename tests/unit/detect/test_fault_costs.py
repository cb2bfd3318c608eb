"""Costs that the detector states, against what the same simulated steps gain without the fault."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from detect.faults import parse
from detect.layout import Grid
from detect.noise import CPU
from detect.runner import StepLengths
from detect.simulation import SimulatedJob
from detect.suite import LAYOUTS, DetectionCase

from megatronapp_analyzer.detect.effect import OffCpuParts, OffCpuTimes, Remedy, seconds_lost
from megatronapp_analyzer.graph.build import build
from megatronapp_analyzer.graph.edges import EdgeKind
from megatronapp_analyzer.model import Cause, Communicator, JobLayout, StepRecords, SubjectType, VerdictSubject
from megatronapp_common.trace import DURATION_UNIT_NS, RecordKind

LAYOUT = JobLayout.grid(dp=2, pp=2, ranks_per_worker=2)
BEGIN, STEPS = 25, 50


Faults = tuple[tuple[int, str, Callable[[int], float]], ...]
"""Rank, kind and factor in each step of several faults."""


def compute(rank: int, factor: float) -> tuple[int, str, Callable[[int], float]]:
    return rank, "compute", lambda step: factor


def stalls(rank: int, part: Callable[[int], float]) -> tuple[int, str, Callable[[int], float]]:
    """Return stalls before each forward pass, as a part of its length in each step."""
    return rank, "host", lambda step: 1.0 + part(step)


# Stalls of 0.14 forward passes are 3.6 % of a step, those of 0.11 are 2.8 %. On devices a delay of 0.5 % and more is
# named that is evidence in four of the last five steps (ADR 29); until there were two references, it took 3 %.
CASES: dict[str, tuple[Faults, set[tuple[int, str]]]] = {
    "beside a slower rank": (
        (compute(0, 1.9), compute(3, 1.5), stalls(3, lambda step: 0.6)),
        {(0, "compute"), (3, "compute"), (3, "host")},
    ),
    "of two sizes": (
        (compute(1, 1.08), stalls(1, lambda step: 0.14 if step % 5 < 3 else 0.11)),
        {(1, "compute"), (1, "host")},
    ),
    "in three steps of five": (
        (compute(1, 1.08), stalls(1, lambda step: 0.14 if step % 5 < 3 else 0.0)),
        {(1, "compute")},
    ),
    "below the limit": ((compute(1, 1.08), stalls(1, lambda step: 0.015)), {(1, "compute")}),
}


@pytest.mark.full("variants of a simulated job")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_stalls_hide_no_slow_compute_and_are_named_at_their_cost(
    sim: ModuleType, judge: Callable[..., Any], case: str, seed: int
) -> None:
    """A subject is named if it costs enough, often enough, also next to another fault of the same rank or of another.

    What is named costs within 15 % of what the simulation gains without it, the mean of alone and after all others.
    Over seeds 10 to 19 the deviation of a job was 2 % for slow compute and 6 % for stalls of two sizes. Next to a
    slower rank, the stalls cost too little with two of them, 7 and 14 of 23 ms: half of the ranks are slow there, and
    both were taken for slower than they were, rank 3 for 1.8 and 1.7 times as slow instead of 1.5.
    """
    faults, named = CASES[case]

    def simulated(chosen: Faults) -> list[StepRecords]:
        active = tuple(
            sim.Fault(rank=rank, kind=kind, factor=size(step), from_step=step, steps=1)
            for rank, kind, size in chosen
            for step in range(BEGIN, STEPS)
            if size(step) > 1.0
        )
        job = sim.Job(layout=LAYOUT, noise=sim.GPU, faults=active)
        return list(sim.Simulator(job, seed).steps(0, STEPS))

    def mean_s(chosen: Faults) -> float:
        return float(np.mean([view.end_ns - view.start_ns for view in simulated(chosen)[BEGIN:]])) * 1e-9

    run = judge(LAYOUT, simulated(faults))
    assert run.subjects == {("rank", (rank,), cause) for rank, cause in named}
    costs = {(*verdict.subject.ranks, str(verdict.cause)): verdict.seconds_per_step for _, verdict in run.verdicts}
    all_s, none_s = mean_s(faults), mean_s(())
    for fault in faults:
        if fault[:2] in named:
            others = tuple(other for other in faults if other is not fault)
            true_s = (all_s - mean_s(others) + mean_s((fault,)) - none_s) / 2
            assert costs[fault[:2]] == pytest.approx(true_s, rel=0.15)


def views_of(case: DetectionCase, lengths: StepLengths) -> list[StepRecords]:
    comms = {
        rank: {slot: Communicator(kind, members) for slot, (kind, members) in table.items()}
        for rank, table in case.job.grid.comms.items()
    }
    return [
        StepRecords(
            attempt=0,
            step=trace.step,
            records=trace.records,
            comms=comms,
            boot_ids=dict(enumerate(trace.boot_ids)),
            real_time_s=trace.real_time_s,
        )
        for trace in lengths.traces(case.steps)
    ]


def layout_of(grid: Grid) -> JobLayout:
    sizes = {"ranks_per_worker": grid.ranks_per_worker, "ranks_per_node": grid.ranks_per_node}
    return JobLayout.grid(tp=grid.tp, dp=grid.dp, pp=grid.pp, vpp=grid.vpp, **sizes)


@pytest.mark.full("several seeds")
@pytest.mark.parametrize(("layout", "rank"), [("dp4-pp2", 2), ("dp4-pp2", 6), ("dp2-pp4", 2)])
def test_the_cost_of_stops_is_what_the_same_steps_gain_without_them(
    judge: Callable[..., Any], layout: str, rank: int
) -> None:
    """Compare the steps that the cost is the mean of, over six jobs.

    What stops of a fifth of the time cost differs from step to step by two thirds of the mean, so the cost of 16 steps
    says that of 20 only within some 10 %. In the same steps the deviation of a job is 2.5 %, that of six jobs 1 %; over
    eight others the mean was 2 to 3 % too high. Three times the deviation beyond 3 % is the limit.
    """
    grid, stated_s, gained_s = LAYOUTS[layout], 0.0, 0.0
    faults = parse(f"stop rank={rank} duty=0.2 cycle=0.1 from=20", grid)
    job = SimulatedJob(grid=grid, noise=CPU, faults=faults)
    for seed in range(21, 27):
        case = DetectionCase(row="stop", layout=layout, job=job, seed=seed, steps=40, faults=faults)
        lengths = StepLengths(case)
        run = judge(layout_of(grid), views_of(case, lengths))
        assert run.subjects == {("rank", (rank,), "host")}
        stated_s += run.last.seconds_per_step
        gained_s += float((lengths.of(faults) - lengths.of(()))[list(run.last.evidence_steps)].mean())
    assert stated_s == pytest.approx(gained_s, rel=0.06)


def quiet_step(sim: ModuleType) -> StepRecords:
    """Return a step of two stages without noise, in which the first forward pass of stage 0 takes 20 ms."""
    simulator = sim.Simulator(sim.Job(layout=JobLayout.grid(pp=2), noise=sim.QUIET), 1)
    steps: list[StepRecords] = list(simulator.steps(0, 2))
    return steps[-1]


def stopped_optimizer(view: StepRecords, rank: int, *, stopped_s: float = 0.0, queued_s: float = 0.0) -> float:
    """Return the cost of stops of a rank in a step in which its optimizer was stopped, or waited for a processor."""
    graph = build(view)
    spans, edges = graph.spans, graph.edges
    own = (spans["kind"] == RecordKind.OPTIMIZER) & (spans["rank"] == rank)
    chosen = own[edges.span] & (edges.kind == EdgeKind.SPAN)
    longer = np.where(chosen, edges.weight + stopped_s + queued_s, edges.weight)
    graph = dataclasses.replace(graph, edges=dataclasses.replace(edges, weight=longer))
    off_cpu = OffCpuTimes(stopped_s=np.where(chosen, stopped_s, 0.0), queued_s=np.where(chosen, queued_s, 0.0))
    remedy = Remedy(
        subject=VerdictSubject(type=SubjectType.RANK, ranks=(rank,)),
        cause=Cause.HOST,
        ratio=1.0,
        excess_s=0.0,
        off_cpu_parts=OffCpuParts(stopped=1.0),
    )
    return float(seconds_lost(graph, [remedy], off_cpu=off_cpu)[0])


def begun_later(view: StepRecords, rank: int, late_ms: int) -> StepRecords:
    """Return a step whose first wait for input begins later on a rank, and ends when it did."""
    records = view.records.copy()
    first, wait = (
        np.flatnonzero((records["rank"] == rank) & (records["kind"] == kind) & (records["microbatch"] == 0))[0]
        for kind in (RecordKind.RECV_POST, RecordKind.RECV_WAIT)
    )
    records["start_ns"][[first, wait]] += np.uint64(late_ms * 1_000_000)
    records["duration"][wait] -= np.uint32(late_ms * 1_000_000 // DURATION_UNIT_NS)
    return dataclasses.replace(view, records=records)


def reading_first(view: StepRecords, rank: int, read_ms: int) -> StepRecords:
    """Return a step in which a rank reads its data, for a time, before it waits for its first input."""
    records = view.records
    (post,) = records[
        (records["rank"] == rank) & (records["kind"] == RecordKind.RECV_POST) & (records["microbatch"] == 0)
    ]
    data = post.copy()
    data["kind"], data["start_ns"] = RecordKind.DATA, post["start_ns"] - np.uint64(read_ms * 1_000_000)
    data["duration"] = read_ms * 1_000_000 // DURATION_UNIT_NS
    records = np.append(records, data)
    return dataclasses.replace(view, records=records[np.lexsort((records["start_ns"], records["rank"]))])


def on_other_clock(view: StepRecords, rank: int, ahead_ms: int) -> StepRecords:
    """Return a step in which the clock of a rank is ahead of the others by a time, which may be negative."""
    records = view.records.copy()
    nanoseconds = records["start_ns"].astype(np.int64) + np.where(records["rank"] == rank, ahead_ms * 1_000_000, 0)
    records["start_ns"] = nanoseconds.astype(np.uint64)
    return dataclasses.replace(view, records=records)


def test_a_stop_after_the_passes_of_a_later_stage_costs_what_the_next_step_waits_for_it(sim: ModuleType) -> None:
    """Until the first forward pass of stage 0 has ended, after 20 ms, stage 1 of the next step can do nothing."""
    step = quiet_step(sim)
    assert stopped_optimizer(step, 0, stopped_s=0.012) == pytest.approx(0.012, abs=1e-6)
    assert stopped_optimizer(step, 1, stopped_s=0.012) == pytest.approx(0.0, abs=1e-6)
    assert stopped_optimizer(step, 1, stopped_s=0.05) == pytest.approx(0.03, abs=1e-3)


def test_a_stop_after_the_passes_of_every_step_costs_as_much_as_a_single_stop(sim: ModuleType) -> None:
    """The step before had such a stop, too, which made the wait for input shorter."""
    step = begun_later(quiet_step(sim), 1, 12)
    assert stopped_optimizer(step, 1, stopped_s=0.012) == pytest.approx(0.0, abs=1e-6)
    assert stopped_optimizer(step, 1, stopped_s=0.05) == pytest.approx(0.03, abs=1e-3)


def test_a_later_stage_that_reads_data_first_has_less_time_for_stops(sim: ModuleType) -> None:
    step = reading_first(quiet_step(sim), 1, 8)
    assert stopped_optimizer(step, 1, stopped_s=0.05) == pytest.approx(0.038, abs=1e-3)


@pytest.mark.parametrize("ahead_ms", [-5, 5])
def test_an_error_of_a_clock_changes_the_cost_by_no_more_than_itself(sim: ModuleType, ahead_ms: int) -> None:
    step = on_other_clock(quiet_step(sim), 1, ahead_ms)
    assert stopped_optimizer(step, 1, stopped_s=0.05) == pytest.approx(0.03, abs=0.0055)


def test_run_queue_delays_are_no_cost_of_stops(sim: ModuleType) -> None:
    step = quiet_step(sim)
    assert stopped_optimizer(step, 0, queued_s=0.012) == 0.0
    assert stopped_optimizer(step, 0, stopped_s=0.012, queued_s=0.012) == pytest.approx(0.012, abs=1e-6)
