"""Scores the detector on simulated jobs: named right, false alarms, steps from onset to verdict.

    python bench/bench_detect.py --runs 60 --seed 1

Every run is a separate job. A faulty run has one fault at a random rank and step; it is named right only if
exactly this subject and cause are named, after the onset. A healthy run is a false alarm if
anything is named. The same for machines that become slow for all ranks, which is no rank's fault.
Anchors on the same data: a plain threshold on peers (compute beyond 1.5 times the median of the others of the stage
in one step), as the simplest rules do it.
"""

import argparse
import dataclasses
import multiprocessing
import time
from collections.abc import Iterable

import exact_bounds
import numpy as np
import pipeline_simulator as ps

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.detect.features import extract
from megatronapp_analyzer.model import JobLayout, StepRecords

LAYOUTS = {
    "DP1 PP4": JobLayout.grid(pp=4, ranks_per_worker=2),
    "DP2 PP2": JobLayout.grid(dp=2, pp=2, ranks_per_worker=2),
    "DP4 PP2": JobLayout.grid(dp=4, pp=2, ranks_per_worker=4),
    "TP2 PP2": JobLayout.grid(tp=2, pp=2, ranks_per_worker=2),
    "DP8": JobLayout.grid(dp=8, ranks_per_worker=4),
    "single rank": JobLayout.grid(),
}
HOSTS = {"shared CPU": (ps.SHARED_CPU, 2.0), "GPU": (ps.GPU, 1.2)}
"""Noise, and the smallest factor of a fault there."""
STEPS = 70
ANCHOR_RATIO = 1.5


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    layout: str
    host: str
    kind: str
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    named: tuple[tuple[str, tuple[int, ...], str], ...]
    truth: tuple[str, tuple[int, ...], str] | None
    onset: int
    first_step: int | None
    anchor_right: bool
    anchor_spoke: bool
    seconds_per_step: float

    @property
    def right(self) -> bool:
        early = self.first_step is not None and self.first_step < self.onset
        return self.named == ((self.truth,) if self.truth else ()) and not early


def main() -> None:
    options = parse_options()
    cases = [
        Case(layout, host, kind, options.seed * 100_003 + number)
        for layout in LAYOUTS
        for host in HOSTS
        for kind in kinds_of(LAYOUTS[layout])
        for number in range(options.runs)
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        outcomes = pool.map(run, cases, chunksize=8)
    report(outcomes)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="runs of each kind, layout and machine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


def kinds_of(layout: JobLayout) -> list[str]:
    kinds = ["compute", "host", "healthy"]
    if layout.pp > 1:
        kinds.insert(2, "link")
    return kinds + (["machine"] if layout.world > 1 else [])


def run(case: Case) -> Outcome:
    """One job from its first step to its last."""
    layout, rng = LAYOUTS[case.layout], np.random.default_rng(case.seed)
    noise, least = HOSTS[case.host]
    onset = int(rng.integers(20, 40))
    fault = draw_fault(case.kind, layout, onset, float(rng.uniform(least, 3.0)), rng)
    slow = float(rng.uniform(1.3, 3.0))
    job = ps.Job(
        layout=layout,
        noise=noise,
        microbatches=int(rng.choice([4, 8])),
        stage_weight=tuple(rng.uniform(0.8, 1.25, layout.pp)),
        faults=(fault,) if fault else (),
        launch_ratio=float(np.random.default_rng(case.seed + 1).uniform(0.9, 1.4)),
        global_slowdown=lambda step: slow if case.kind == "machine" and step >= onset else 1.0,
    )
    views = list(ps.Simulator(job, case.seed).steps(0, STEPS))
    detector, first = Detector(layout), None
    named: dict[tuple[str, tuple[int, ...], str], None] = {}
    begun = time.perf_counter()
    for view in views:
        for verdict in detector.observe(view):
            named[(str(verdict.subject.type), verdict.subject.ranks, str(verdict.cause))] = None
            first = view.step if first is None else first
    spent = time.perf_counter() - begun
    anchored = anchor(views, layout)
    return Outcome(
        case=case,
        named=tuple(named),
        truth=truth_of(fault, layout, noise),
        onset=onset,
        first_step=first,
        anchor_right=fault is not None and fault.kind == "compute" and anchored == {fault.rank},
        anchor_spoke=bool(anchored),
        seconds_per_step=spent / STEPS,
    )


def draw_fault(kind: str, layout: JobLayout, onset: int, factor: float, rng: np.random.Generator) -> ps.Fault | None:
    if kind in ("healthy", "machine"):
        return None
    rank = int(rng.integers(layout.world))
    if kind != "link":
        return ps.Fault(rank=rank, kind=kind, factor=factor, from_step=onset)
    at = layout.coordinates[rank]
    stages = [stage for stage in (at.pp - 1, at.pp + 1) if 0 <= stage < layout.pp]
    peer = layout.coordinates.index(dataclasses.replace(at, pp=int(rng.choice(stages))))
    return ps.Fault(rank=rank, kind=kind, factor=factor, from_step=onset, peer=peer)


def truth_of(fault: ps.Fault | None, layout: JobLayout, noise: ps.Noise) -> tuple[str, tuple[int, ...], str] | None:
    if fault is None:
        return None
    if fault.kind == "link":
        assert fault.peer is not None
        within = noise.device and layout.nodes[fault.peer] == layout.nodes[fault.rank]
        return ("link", (fault.peer, fault.rank), "nvlink-pcie" if within else "link")
    return ("rank", (fault.rank,), fault.kind)


def anchor(views: Iterable[StepRecords], layout: JobLayout) -> set[int]:
    """Ranks that a plain threshold on wall-clock peers names in any step after the first."""
    stage = np.array([at.pp for at in layout.coordinates])
    named: set[int] = set()
    for view in views:
        if view.step == 0:
            continue
        compute = extract(view, layout).compute_s
        for rank in range(layout.world):
            others = compute[(stage == stage[rank]) & (np.arange(layout.world) != rank)]
            if len(others) and compute[rank] > ANCHOR_RATIO * np.median(others):
                named.add(rank)
    return named


def report(outcomes: list[Outcome]) -> None:
    print("| layout | machine | kind | named right | onset to verdict, steps (median, most) | ms a step |")
    print("|---|---|---|---|---|---|")
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.case.layout, outcome.case.host, outcome.case.kind), []).append(outcome)
    for (layout, host, kind), group in groups.items():
        delays = [
            outcome.first_step - outcome.onset + 1
            for outcome in group
            if outcome.truth and outcome.first_step is not None
        ]
        waited = f"{np.median(delays):.0f}, {max(delays)}" if delays else "-"
        cost = 1e3 * np.median([outcome.seconds_per_step for outcome in group])
        right = exact_bounds.with_bounds(sum(outcome.right for outcome in group), len(group))
        print(f"| {layout} | {host} | {kind} | {right} | {waited} | {cost:.1f} |")
    totals(outcomes)


def totals(outcomes: list[Outcome]) -> None:
    faulty = [outcome for outcome in outcomes if outcome.truth]
    healthy = [outcome for outcome in outcomes if not outcome.truth]
    spoke = [outcome for outcome in outcomes if outcome.named]
    located = [
        outcome for outcome in faulty if any(name[:2] == outcome.truth[:2] for name in outcome.named if outcome.truth)
    ]
    print(f"\nnamed right, only that:  {exact_bounds.with_bounds(sum(o.right for o in faulty), len(faulty))}")
    print(f"found at all (recall):   {exact_bounds.with_bounds(sum(bool(o.named) for o in faulty), len(faulty))}")
    print(f"right subject:           {exact_bounds.with_bounds(len(located), len(faulty))}")
    print(f"precision of runs:       {exact_bounds.with_bounds(sum(o.right for o in spoke), len(spoke))}")
    print(f"false alarms, healthy:   {exact_bounds.with_bounds(sum(bool(o.named) for o in healthy), len(healthy))}")
    compute = [outcome for outcome in faulty if outcome.case.kind == "compute"]
    print(f"anchor, compute faults:  {exact_bounds.with_bounds(sum(o.anchor_right for o in compute), len(compute))}")
    print(f"anchor, false alarms:    {exact_bounds.with_bounds(sum(o.anchor_spoke for o in healthy), len(healthy))}")
    for outcome in [outcome for outcome in outcomes if not outcome.right][:20]:
        named = f"{outcome.named or 'nothing'} at {outcome.first_step}"
        print(f"  wrong: {outcome.case} truth {outcome.truth} onset {outcome.onset}: {named}")


if __name__ == "__main__":
    main()
