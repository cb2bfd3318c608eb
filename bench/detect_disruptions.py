"""Disturbs the records of simulated jobs, and counts verdicts that are right, unknown and wrong (docs/benchmarks.md).

    python bench/detect_disruptions.py --seeds 4                      # all disruptions and layouts, tuning seeds
    python bench/detect_disruptions.py --only "hole" "clock" --misses

A job of 140 steps of about half a second has no fault, or one slow rank (compute or host) from step 40 on. What happens
to its records begins at step 70: agents, the hub or ranks die, clocks jump, records are
torn or doubled. A job is

    right     if the slow rank is named alone, or if nothing is named in a healthy job
    unknown   if nothing is named although a rank is slow, or only its tensor-parallel unit
    wrong     if a healthy subject is named at any time, or the detector fails

"Still named in the end" counts the right jobs with a slow rank in which it is named after the last step, too.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from detect.current import CurrentDetector
from detect.faults import parse
from detect.noise import GPU
from detect.protocol import StepTrace, Verdict
from detect.score import Truth, Window, judge
from detect.simulation import JobSimulation, SimulatedJob
from detect.suite import LAYOUTS
from numpy.typing import NDArray

STEPS = 140
FAULT, BEGIN, END = 40, 70, 110
"""First step of the fault, and of the disruption; first step after a hole."""
LOST_PART = 1 / 3
GRIDS = ("dp4-pp2", "dp2-pp4", "nodes: dp4-tp4", "dp4-pp4-vpp2")
KINDS = ("healthy", "compute", "host")
RESTART_S = 90.0
"""From the last step of an attempt to the first of the next."""
RESUMED = 15
"""Steps since the checkpoint, which are repeated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisturbedJob:
    """A job and the rank, or its node, that the disruption is about."""

    job: SimulatedJob
    seed: int
    rank: int
    rng: np.random.Generator

    def traces(self) -> Iterator[StepTrace]:
        return JobSimulation(self.job, self.seed, STEPS).traces()

    def of_node(self, records: NDArray[np.void]) -> NDArray[np.bool_]:
        nodes = self.job.grid.node_of
        found: NDArray[np.bool_] = nodes[records["rank"]] == nodes[self.rank]
        return found


Play = Callable[[DisturbedJob], Iterable[StepTrace]]


def hole(begin: int, end: int) -> Play:
    """Return what leaves out the records of a node, as when its agent is dead."""

    def play(disturbed: DisturbedJob) -> Iterator[StepTrace]:
        for trace in disturbed.traces():
            missing = disturbed.of_node(trace.records) & (begin <= trace.step < end)
            yield without(trace, missing)

    return play


def without(trace: StepTrace, missing: NDArray[np.bool_]) -> StepTrace:
    if not missing.any():
        return trace
    return dataclasses.replace(trace, records=trace.records[~missing], lost=trace.lost + int(missing.sum()))


def no_hub(disturbed: DisturbedJob) -> Iterator[StepTrace]:
    """Leave out whole steps, as when neither the hub nor its successor had room for them."""
    return (trace for trace in disturbed.traces() if not BEGIN <= trace.step < END)


def clock_jump(seconds: float) -> Play:
    """Return what sets the monotonic clock of a node, and of all its records from then on."""

    def play(disturbed: DisturbedJob) -> Iterator[StepTrace]:
        for trace in disturbed.traces():
            yield moved(trace, seconds, disturbed.of_node(trace.records)) if trace.step >= BEGIN else trace

    return play


def moved(trace: StepTrace, seconds: float, rows: NDArray[np.bool_]) -> StepTrace:
    records = trace.records.copy()
    records["start_ns"][rows] = (records["start_ns"][rows].astype(np.int64) + int(seconds * 1e9)).astype(np.uint64)
    return dataclasses.replace(trace, records=records)


def real_clock_jump(seconds: float) -> Play:
    """Return what sets the real clock of the hub."""

    def play(disturbed: DisturbedJob) -> Iterator[StepTrace]:
        for trace in disturbed.traces():
            jumped = seconds if trace.step >= BEGIN else 0.0
            yield dataclasses.replace(trace, real_time_s=trace.real_time_s + jumped)

    return play


def restart(disturbed: DisturbedJob) -> Iterator[StepTrace]:
    """End the attempt, and begin another from a checkpoint; the same rank is slow in it from its first step on."""
    end_s = 0.0
    for trace in disturbed.traces():
        if trace.step == BEGIN:
            break
        end_s = trace.real_time_s
        yield trace
    faults = tuple(dataclasses.replace(fault, begin=0) for fault in disturbed.job.faults)
    job = dataclasses.replace(disturbed.job, faults=faults)
    resumed = BEGIN - RESUMED
    pause_s = 0.0
    for trace in JobSimulation(job, disturbed.seed + 1_000, STEPS - resumed).traces():
        pause_s = pause_s or end_s + RESTART_S - trace.real_time_s
        later = moved(trace, pause_s, np.ones(len(trace.records), bool))
        later.records["step"] += resumed
        real_time_s = trace.real_time_s + pause_s
        yield dataclasses.replace(later, step=trace.step + resumed, real_time_s=real_time_s, attempt=1)


def ordinals_again(disturbed: DisturbedJob) -> Iterator[StepTrace]:
    """Let the numbers of a rank's messages begin at 0 again within three steps."""
    for trace in disturbed.traces():
        rows = np.flatnonzero((trace.records["rank"] == disturbed.rank) & (BEGIN <= trace.step < BEGIN + 3))
        if not len(rows):
            yield trace
            continue
        records, second = trace.records.copy(), rows[len(rows) // 2 :]
        for comm in np.unique(records["comm"][second]):
            of_comm = second[records["comm"][second] == comm]
            records["ordinal"][of_comm] -= records["ordinal"][of_comm].min()
        yield dataclasses.replace(trace, records=records)


def torn_steps(disturbed: DisturbedJob) -> Iterator[StepTrace]:
    """Cut off the last third of a rank's records in every third step."""
    for trace in disturbed.traces():
        rows = np.flatnonzero(trace.records["rank"] == disturbed.rank)
        torn = np.zeros(len(trace.records), bool)
        torn[rows[int(len(rows) * (1 - LOST_PART)) :]] = trace.step >= BEGIN and trace.step % 3 == 0
        yield without(trace, torn)


def torn_records(disturbed: DisturbedJob) -> Iterator[StepTrace]:
    """Write a wrong start and length into three records of a rank in every third step."""
    for trace in disturbed.traces():
        if trace.step < BEGIN or trace.step % 3:
            yield trace
            continue
        records, rng = trace.records.copy(), disturbed.rng
        rows = rng.choice(np.flatnonzero(records["rank"] == disturbed.rank), 3, replace=False)
        records["duration"][rows] = rng.integers(1 << 27, size=3)  # up to 1 s
        records["start_ns"][rows] += rng.integers(1_000_000_000, size=3).astype(np.uint64)
        ordered = np.lexsort((records["start_ns"], records["rank"]))
        yield dataclasses.replace(trace, records=records[ordered])


def doubled_records(disturbed: DisturbedJob) -> Iterator[StepTrace]:
    """Give all records of a node twice in every third step."""
    for trace in disturbed.traces():
        of_node = disturbed.of_node(trace.records) & (trace.step >= BEGIN and trace.step % 3 == 0)
        yield dataclasses.replace(trace, records=np.repeat(trace.records, 1 + of_node))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disruption:
    """A way to disturb the records of a job."""

    play: Play
    at_fault: bool = True
    """True if it happens to the slow rank or its node, where there are any."""
    fault_begin: int = FAULT


DISRUPTIONS = {
    "none": Disruption(play=lambda disturbed: disturbed.traces()),
    "hole of 40 steps, its node": Disruption(play=hole(BEGIN, END)),
    "hole of 40 steps, another node": Disruption(play=hole(BEGIN, END), at_fault=False),
    "hole of 20 steps, its node": Disruption(play=hole(BEGIN, BEGIN + 20)),
    "hole that never ends, its node": Disruption(play=hole(BEGIN, STEPS)),
    "hole, the fault begins inside": Disruption(play=hole(BEGIN, END), fault_begin=BEGIN + 15),
    "40 steps without a hub": Disruption(play=no_hub),
    "40 steps without a hub, the fault begins inside": Disruption(play=no_hub, fault_begin=BEGIN + 15),
    **{f"clock jumps by {1e3 * jump:+g} ms": Disruption(play=clock_jump(jump)) for jump in (0.005, 0.05, 3.0)},
    **{f"clock jumps by {1e3 * jump:+g} ms": Disruption(play=clock_jump(jump)) for jump in (-0.005, -0.05, -3.0)},
    "clock of another node jumps by +50 ms": Disruption(play=clock_jump(0.05), at_fault=False),
    "real clock set by -1 h": Disruption(play=real_clock_jump(-3600.0)),
    "real clock set by +1 h": Disruption(play=real_clock_jump(3600.0)),
    "new attempt": Disruption(play=restart),
    "numbers of messages begin again": Disruption(play=ordinals_again),
    "steps cut off": Disruption(play=torn_steps),
    "steps cut off, another rank": Disruption(play=torn_steps, at_fault=False),
    "wrong times in records": Disruption(play=torn_records),
    "wrong times in records, another rank": Disruption(play=torn_records, at_fault=False),
    "doubled records": Disruption(play=doubled_records),
    "doubled records, another node": Disruption(play=doubled_records, at_fault=False),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisturbedCase:
    """A job to run."""

    disruption: str
    layout: str
    kind: str
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisturbedOutcome:
    """A job, and how its verdicts were judged."""

    case: DisturbedCase
    result: str
    """`right`, `unknown` or `wrong`."""
    to_the_end: bool
    notes: tuple[str, ...] = ()
    """Subjects that were named wrongly with the place of the step, or how the detector failed."""


def drawn(case: DisturbedCase) -> tuple[DisturbedJob, tuple[Truth, ...]]:
    """Draw the job of a case and its fault."""
    grid, disruption = LAYOUTS[case.layout], DISRUPTIONS[case.disruption]
    rng = np.random.default_rng((case.seed, *case.layout.encode(), *case.kind.encode()))
    slow = int(rng.integers(grid.world))
    size = f"factor={rng.uniform(1.1, 1.6):.3f}" if case.kind == "compute" else f"stall={rng.uniform(0.8, 2.0):.3f}"
    text = "" if case.kind == "healthy" else f"{case.kind} rank={slow} {size} from={disruption.fault_begin}"
    faults = parse(text, grid)
    elsewhere = np.flatnonzero(grid.node_of != grid.node_of[slow])
    job = SimulatedJob(grid=grid, noise=GPU, faults=faults, clock_offset_s=5e-3, clock_drift_ppm=20)
    rank = slow if disruption.at_fault else int(rng.choice(elsewhere))
    truths = tuple(
        Truth(
            subject=fault.subject,
            cause=fault.cause,
            begin=fault.begin,
            end=1 << 30,
            noticeable_from=fault.begin,
            cost_s=0.0,
            cost_fraction=1.0,
        )
        for fault in faults
    )
    return DisturbedJob(job=job, seed=case.seed, rank=rank, rng=rng), truths


def run(case: DisturbedCase) -> DisturbedOutcome:
    """Run a job, and judge all that was named."""
    disturbed, truths = drawn(case)
    detector = CurrentDetector(disturbed.job.grid)
    named: dict[int, tuple[Verdict, ...]] = {}
    begin = 0
    try:
        for place, trace in enumerate(DISRUPTIONS[case.disruption].play(disturbed)):
            named[place] = tuple(detector.step(trace))
            begin += trace.step < DISRUPTIONS[case.disruption].fault_begin and trace.attempt == 0
    except Exception:  # any failure of the detector is one that the table counts
        return DisturbedOutcome(case=case, result="wrong", to_the_end=False, notes=(traceback.format_exc(),))
    truths = tuple(dataclasses.replace(truth, begin=begin) for truth in truths)
    window = Window(grid=disturbed.job.grid, truths=truths, named=named, steps=len(named), hours=0.0)
    kinds = {(verdict, judge(window, verdict.subject, at)[0]): at for at, some in named.items() for verdict in some}
    false = [
        f"{at}: {verdict.subject.ranks} {verdict.cause}" for (verdict, kind), at in kinds.items() if kind == "false"
    ]
    hits = [at for (_, kind), at in kinds.items() if kind == "hit"]
    right = bool(hits) if truths else not named or not any(named.values())
    result = "wrong" if false else "right" if right else "unknown"
    return DisturbedOutcome(
        case=case,
        result=result,
        to_the_end=result == "right" and bool(truths) and bool(named[len(named) - 1]),
        notes=tuple(false),
    )


def table(outcomes: Sequence[DisturbedOutcome]) -> str:
    """Return the counts of each disruption as a Markdown table."""
    columns = ["disruption", "jobs with a slow rank", "right; still named in the end", "unknown", "wrong"]
    columns += ["healthy jobs", "wrong"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    groups: dict[str, list[DisturbedOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.case.disruption, []).append(outcome)
    for outcome in outcomes:
        groups.setdefault(f"all, {outcome.case.layout}", []).append(outcome)
    groups["all"] = list(outcomes)
    for name, group in groups.items():
        faulty = [outcome for outcome in group if outcome.case.kind != "healthy"]
        healthy = [outcome for outcome in group if outcome.case.kind == "healthy"]
        right, unknown, wrong = (
            sum(each.result == result for each in faulty) for result in ("right", "unknown", "wrong")
        )
        ends = sum(outcome.to_the_end for outcome in faulty)
        alarms = sum(outcome.result == "wrong" for outcome in healthy)
        lines.append(f"| {name} | {len(faulty)} | {right}, {ends} | {unknown} | {wrong} | {len(healthy)} | {alarms} |")
    return "\n".join(lines)


def cases_of(options: argparse.Namespace) -> list[DisturbedCase]:
    """Return the jobs of the command line; ends the program where nothing is chosen."""
    names = [name for name in DISRUPTIONS if not options.only or any(part in name for part in options.only)]
    if not names:
        sys.exit(f"--only: no disruption has {options.only[0]!r} in its name; choose of: {', '.join(DISRUPTIONS)}")
    seeds = range(options.seed, options.seed + options.seeds)
    return [
        DisturbedCase(disruption=name, layout=layout, kind=kind, seed=seed)
        for name, seed, layout, kind in itertools.product(names, seeds, options.layouts, KINDS)
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="jobs of each disruption, layout and kind of fault")
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(GRIDS))
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="disruptions with this in their name")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--misses", action="store_true", help="print what was named wrongly")
    parser.add_argument("--out", type=pathlib.Path, help="also write the table to this file, after each job")
    return parser.parse_args()


def main() -> int:
    """Run all jobs and print the table; returns 1 if something was wrong."""
    options = parse_options()
    outcomes: list[DisturbedOutcome] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for outcome in pool.map(run, cases_of(options)):
            outcomes.append(outcome)
            if options.misses and outcome.result != "right":
                print(outcome.result, outcome.case, *outcome.notes, file=sys.stderr, flush=True)
            if options.out:
                options.out.write_text(table(outcomes) + "\n", encoding="utf-8")
    print(table(outcomes))
    return int(any(outcome.result == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
