"""Seconds from a whole step to its judgement, for jobs of any size: what the process next to the hub does.

    python bench/bench_detector_scale.py                      # 16,384 ranks of about 400 spans, 2,048 nodes, 4 GB
    python bench/bench_detector_scale.py --data 8 --steps 12  # 1,024 ranks
    python bench/bench_detector_scale.py --slow-from 0 --factor 2 --steps 9   # from the fifth step on with a finding
    python bench/bench_detector_scale.py --process --threads 4 --steps 9      # as next to a hub, with four threads

Steps are those of bench_ingest.py, every rank with noise in its passes from --seed, and one of them slow. `judged` is
all that the process does with a step: clocks, imposed waits and the detector. Each step is timed on the wall and by the
processor time of all threads. With --process a separate process judges, as next to a hub, and times are on the wall,
from the call until its answer.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Iterator

import bench_hub
import bench_ingest
import numpy as np

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.graph.part_threads import use_threads
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.store import StoredStep, StoreLimits
from megatronapp_analyzer.hub.judge.judging import StepJudging
from megatronapp_analyzer.hub.judge.links import ProcessJudge
from megatronapp_analyzer.model import JobLayout, Verdict
from megatronapp_analyzer.process import available_threads, reuse_freed_memory, thread_count
from megatronapp_common.trace import COMPUTE_KINDS

WARM_STEPS = 3


def steps_of(options: argparse.Namespace) -> Iterator[tuple[JobLayout, StoredStep]]:
    """Yield steps of a job; from --slow-from on, the passes of the slow rank take --factor times as long."""
    bench_hub.PIPELINE, bench_hub.MICROBATCHES = bench_ingest.PIPELINE, options.microbatches
    stage_size = bench_ingest.TENSOR * options.data
    world = bench_ingest.PIPELINE * stage_size
    load = bench_hub.Load(agents=world, steps_per_s=0.2, seconds=0)
    templates = [bench_hub.template(stage * stage_size, load) for stage in range(bench_ingest.PIPELINE)]
    ingest = TraceIngest(StoreLimits(full_steps=1), aligns=False)
    for rank in range(world):
        ingest.add_ring(0, bench_ingest.ring_header(rank, options.data))
    random = np.random.default_rng(options.seed)
    for step in range(options.steps):
        for rank in range(world):
            records = templates[rank // stage_size].copy()
            records["step"] = step
            records["start_ns"] += np.uint64(step * bench_ingest.STEP_NS)
            passes = np.isin(records["kind"], [int(kind) for kind in COMPUTE_KINDS])
            factor = random.normal(1.0, 0.01, len(records)).clip(0.95, 1.05)
            if rank == options.slow_rank and step >= options.slow_from:
                factor *= options.factor
            records["duration"][passes] = (records["duration"] * factor)[passes]
            header = {"rank": rank, "worker": rank // 8, "first": step * len(records), "lost": 0}
            for stored in ingest.add_records(0, header, records.tobytes()).finished:
                layout = ingest.attempts[0].layout
                assert layout is not None
                yield layout, stored


@dataclasses.dataclass(slots=True)
class Judged:
    """Times of the steps, and their verdicts."""

    wall_s: list[float] = dataclasses.field(default_factory=list)
    processor_s: list[float] = dataclasses.field(default_factory=list)
    with_finding_s: list[float] = dataclasses.field(default_factory=list)
    """Times on the wall of steps with a verdict."""
    verdicts: dict[str, Verdict] = dataclasses.field(default_factory=dict)
    ranks: int = 0
    records: int = 0


def judge_steps(options: argparse.Namespace, judging: ProcessJudge | StepJudging) -> Judged:
    """Judge all steps, and print the time of each."""
    found = Judged()
    for layout, step in steps_of(options):
        begun_s, processor_begun_s = time.perf_counter(), time.process_time()
        judgement = judging.judge(layout, step)
        found.wall_s.append(time.perf_counter() - begun_s)
        found.processor_s.append(time.process_time() - processor_begun_s)
        assert not judgement.failures
        found.verdicts |= {verdict.id: verdict for verdict in judgement.verdicts}
        if judgement.verdicts:
            found.with_finding_s.append(found.wall_s[-1])
        found.ranks, found.records = layout.world, len(step.view.records)
        used = "" if options.process else f", {found.processor_s[-1]:.2f} s of processors"
        print(f"step {step.view.step}: {found.wall_s[-1]:.2f} s{used}", flush=True)
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", type=int, default=128, help="data-parallel size (default: %(default)s)")
    made.add_argument("--microbatches", type=int, default=41, help="of a step (default: %(default)s)")
    made.add_argument("--steps", type=int, default=16, help="steps to judge (default: %(default)s)")
    made.add_argument("--slow-rank", type=int, default=77, help="(default: %(default)s)")
    made.add_argument("--factor", type=float, default=1.5, help="slowdown of that rank (default: %(default)s)")
    made.add_argument("--slow-from", type=int, help="first step of that slowdown (default: in the middle)")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--process", action="store_true", help="judge in a separate process")
    made.add_argument(
        "--threads",
        type=thread_count,
        default=available_threads(),
        help="threads that judge (default: the processors of this process, at most 4; here %(default)s)",
    )
    return made


def main() -> int:
    options = parser().parse_args()
    options.slow_from = options.steps // 2 if options.slow_from is None else options.slow_from
    if options.process:
        judge = ProcessJudge(threads=options.threads)
        judge.start()
        judge.wait_until_ready()
        found = judge_steps(options, judge)
        judge.close()
    else:
        reuse_freed_memory()
        threads = use_threads(options.threads)
        found = judge_steps(options, StepJudging(functools.partial(Detector, threads=threads), threads))
    place = " in a separate process" if options.process else ""
    print(f"{found.ranks} ranks, {found.records / 1e6:.2f} million records a step, {options.threads} threads{place}")
    usual, most = statistics.median(found.wall_s[WARM_STEPS:]), max(found.wall_s)
    print(f"judged in {usual:.2f} s on the wall, median after {WARM_STEPS} steps; at most {most:.2f} s")
    if not options.process:
        usual, most = statistics.median(found.processor_s[WARM_STEPS:]), max(found.processor_s)
        print(f"processor time {usual:.2f} s; at most {most:.2f} s")
    if found.with_finding_s:
        usual, most = statistics.median(found.with_finding_s), max(found.with_finding_s)
        print(f"with a finding in {usual:.2f} s, median of {len(found.with_finding_s)} steps; at most {most:.2f} s")
    for verdict in found.verdicts.values():
        print(f"{verdict.state}: {verdict.subject.type} {list(verdict.subject.ranks)}, {verdict.cause}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
