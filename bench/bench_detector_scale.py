"""Seconds from a whole step to its judgement, for jobs of any size: what the process next to the hub does.

    python bench/bench_detector_scale.py                      # 16,384 ranks of about 400 spans, 2,048 nodes, 4 GB
    python bench/bench_detector_scale.py --data 8 --steps 12  # 1,024 ranks
    python bench/bench_detector_scale.py --slow-from 0 --factor 2 --steps 9   # from the fifth step on with a finding

Steps are those of bench_ingest.py, every rank with noise in its passes from --seed, and one of them slow. Times are of
the processor, of one thread. `judged` is all that the process does with a step: clocks, imposed waits and the detector.
With --process a separate process judges, as next to a hub, and times are from the call until its answer, on the wall.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator

import bench_hub
import bench_ingest
import numpy as np

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.store import StoredStep, StoreLimits
from megatronapp_analyzer.hub.judge.judging import StepJudging
from megatronapp_analyzer.hub.judge.links import ProcessJudge
from megatronapp_analyzer.model import JobLayout, Verdict
from megatronapp_analyzer.process import reuse_freed_memory
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=128, help="data-parallel size (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=41, help="of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="steps to judge (default: %(default)s)")
    parser.add_argument("--slow-rank", type=int, default=77, help="(default: %(default)s)")
    parser.add_argument("--factor", type=float, default=1.5, help="slowdown of that rank (default: %(default)s)")
    parser.add_argument("--slow-from", type=int, help="first step of that slowdown (default: in the middle)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--process", action="store_true", help="judge in a separate process")
    options = parser.parse_args()
    options.slow_from = options.steps // 2 if options.slow_from is None else options.slow_from
    judging = ProcessJudge() if options.process else StepJudging(Detector)
    now_s = time.perf_counter if options.process else time.process_time
    if isinstance(judging, ProcessJudge):
        judging.start()
        judging.wait_until_ready()
    else:
        reuse_freed_memory()
    judged_s: list[float] = []
    with_finding_s: list[float] = []
    verdicts: dict[str, Verdict] = {}
    for layout, step in steps_of(options):
        begun_s = now_s()
        judgement = judging.judge(layout, step)
        judged_s.append(now_s() - begun_s)
        assert not judgement.failures
        verdicts |= {verdict.id: verdict for verdict in judgement.verdicts}
        if judgement.verdicts:
            with_finding_s.append(judged_s[-1])
        print(f"step {step.view.step}: {judged_s[-1]:.2f} s", flush=True)
    if isinstance(judging, ProcessJudge):
        judging.close()
    usual = statistics.median(judged_s[WARM_STEPS:])
    print(f"{layout.world} ranks, {len(step.view.records) / 1e6:.2f} million records a step")
    clock = "on the wall" if options.process else "of a processor"
    print(f"judged in {usual:.2f} s {clock}, median after {WARM_STEPS} steps; at most {max(judged_s):.2f} s")
    if with_finding_s:
        usual, most = statistics.median(with_finding_s), max(with_finding_s)
        print(f"with a finding in {usual:.2f} s, median of {len(with_finding_s)} steps; at most {most:.2f} s")
    for verdict in verdicts.values():
        print(f"{verdict.state}: {verdict.subject.type} {list(verdict.subject.ranks)}, {verdict.cause}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
