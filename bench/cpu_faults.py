"""Disturbs training jobs on processors in several ways, and prints what the detector says of each.

    python bench/cpu_faults.py --cores 0-15 --output cpu_faults.json                    # 9 minutes
    python bench/cpu_faults.py --cores 0-15 --bursts-only --minutes 20                  # an hour of three jobs

Layouts are PP4, PP2 x DP2 and TP2 x DP2, two workers of two ranks each, on gloo. Each rank has a core for itself, and
all other processes have the cores that are left. With 5 cores per layout the layouts run at the same time, with fewer
after each other, `--minutes` each; with fewer than 5 cores ranks share them, which is only good for a trial. Needs a
quiet host, as any other work there is a disturbance, too.

A rank, two ranks at once or a whole worker are stopped and continued, for a part of each cycle; other processes contend
for the core of a rank; a rank collects a large heap of garbage in its passes. Then, for the rest of the minutes,
processes run on the cores of ranks for less than a second now and then: such bursts are no fault, and a verdict that
begins among them is a false alarm. The truth of a cost is the median step in the disturbance less that of the healthy
steps before it. A disturbance that makes steps less than 15 % longer may be named or not. Exit code 1 if another one is
not named with its subjects and cause, or if a healthy subject is.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import httpx
import yaml
from fault_campaign import (
    BUSY,
    POLL_S,
    Disturbance,
    FaultCampaign,
    ProcessDisturber,
    collecting_environment,
    is_right,
    table,
)
from gpu_crowded_host import MEGATRONAPP, hub_client, pin, process_of_rank

from megatronapp_common.state import jobs_dir

LAYOUTS = {"pp4": (1, 4, 1), "pp2-dp2": (1, 2, 2), "tp2-dp2": (2, 1, 2), "pp2": (1, 2, 1)}
"""Sizes of the tensor, pipeline and data-parallel groups."""
PUBLISHED = ("pp4", "pp2-dp2", "tp2-dp2")
WORKERS = 2
FIRST, STOPPED, CONTENDED, CALM = 50, 40, 70, 40
"""Steps before the first disturbance, in disturbances of both kinds, and between them."""
LEAST = 0.15
ENOUGH_STEPS = 100_000
LOG_STEPS = 2
"""Steps from which on the hub knows of a newer step of the training."""
BURST_S, PAUSE_S = (0.2, 0.8), (4.0, 12.0)
"""Shortest and longest burst, and time between two."""
START_S = 180.0
"""Time in which a job must have made its first steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuPlan:
    """A job of the campaign, and the cores that it may use."""

    layout: str
    cores: tuple[int, ...]
    """Core of each rank."""

    @property
    def job(self) -> str:
        return f"cpu-faults-{self.layout}"

    @property
    def world(self) -> int:
        return len(self.cores)

    def manifest(self) -> dict[str, Any]:
        tensor, pipeline, data = LAYOUTS[self.layout]
        parallelism: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "data": data}
        if tensor > 1:
            parallelism["sequenceParallel"] = True
        return {
            "apiVersion": "megatronapp.io/v1alpha1",
            "kind": "MegatronJob",
            "metadata": {"name": self.job},
            "spec": {
                "nodes": WORKERS,
                "procPerNode": self.world // WORKERS,
                "gpusPerNode": 0,
                "parallelism": parallelism,
                "model": {
                    "type": "gpt",
                    "numLayers": 4,
                    "hiddenSize": 256,
                    "numAttentionHeads": 4,
                    "seqLength": 128,
                    "vocabSize": 2048,
                },
                "training": {
                    "microBatchSize": 1,
                    "globalBatchSize": 8,
                    "trainIters": ENOUGH_STEPS,
                    "lr": 1.0e-4,
                    "precision": "fp32",
                    "logInterval": LOG_STEPS,
                },
                "data": {"mock": True},
                "env": [collecting_environment()],
                "trace": {"enabled": True},
                "analyzer": {"enabled": True, "retainSeconds": 1800},
            },
        }


class CpuDisturber(ProcessDisturber):
    """Stops ranks of a job, and contends for their cores."""

    def __init__(self, plan: CpuPlan) -> None:
        super().__init__()
        self._cores = plan.cores
        self._pids = [process_of_rank(rank, plan.job) for rank in range(plan.world)]

    def pin(self) -> None:
        """Give each rank its core."""
        for pid, core in zip(self._pids, self._cores, strict=True):
            pin(pid, {core})

    def stop(self, ranks: Sequence[int], duty: float, cycle_s: float) -> None:
        """Stop ranks together for a part of each cycle."""
        self.stop_processes([self._pids[rank] for rank in ranks], duty, cycle_s)

    def collect_in(self, rank: int, pause_s: float) -> None:
        """Let a rank collect its garbage now and then."""
        self.collect(self._pids[rank], pause_s)

    def contend(self, rank: int, contenders: int) -> None:
        """Let other processes use the core of a rank."""
        for _ in range(contenders):
            os.sched_setaffinity(self.run([sys.executable, "-c", BUSY]).pid, {self._cores[rank]})


def disturbances(world: int) -> list[Disturbance[CpuDisturber]]:
    """Return the disturbances in order. Jobs of two ranks, for trials, get those of their ranks."""
    half = world // 2
    last_worker, last = tuple(range(half, world)), world - 1
    planned = [
        (f"stopped 30 % of 0.1 s, rank {half}", lambda d: d.stop([half], 0.3, 0.1), ((half,),)),
        ("stopped 50 % of 0.2 s, rank 1", lambda d: d.stop([1], 0.5, 0.2), ((1,),)),
        (f"stopped 70 % of 0.5 s, rank {last}", lambda d: d.stop([last], 0.7, 0.5), ((last,),)),
        ("stopped 15 % of 0.1 s, rank 0", lambda d: d.stop([0], 0.15, 0.1), ((0,),)),
        ("a worker stopped 40 % of 0.2 s", lambda d: d.stop(last_worker, 0.4, 0.2), (last_worker,)),
        (f"ranks 0 and {last} stopped 40 % of 0.2 s", lambda d: _two(d, 0, last), ((0,), (last,))),
        ("1 contender, rank 1", lambda d: d.contend(1, 1), ((1,),)),
        (f"3 contenders, rank {half}", lambda d: d.contend(half, 3), ((half,),)),
        (f"garbage collections every 0.3 s, rank {last}", lambda d: d.collect_in(last, 0.3), ((last,),)),
    ]
    found: list[Disturbance[CpuDisturber]] = []
    step = FIRST
    for name, start, subjects in planned:
        steps = CONTENDED if "contender" in name else STOPPED
        found.append(Disturbance(name=name, start=start, cause="host", subjects=subjects, begin=step, end=step + steps))
        step += steps + CALM
    return found


def _two(disturber: CpuDisturber, first: int, second: int) -> None:
    """Stop two ranks, in cycles that differ."""
    disturber.stop([first], 0.4, 0.2)
    disturber.stop([second], 0.4, 0.23)


def burst(campaign: FaultCampaign[CpuDisturber], disturber: CpuDisturber, plan: CpuPlan, deadline: float) -> int:
    """Run short bursts of other processes until `deadline`; return their number."""
    draw, count = random.Random(plan.job), 0
    pause_until = end_at = 0.0
    while (now := time.monotonic()) < deadline:
        campaign.step()
        if end_at and now >= end_at:
            disturber.calm()
            end_at, pause_until = 0.0, now + draw.uniform(*PAUSE_S)
        elif not end_at and now >= pause_until:
            disturber.contend(draw.randrange(plan.world), draw.randint(1, 3))
            end_at, count = now + draw.uniform(*BURST_S), count + 1
        time.sleep(POLL_S / 2)
    disturber.calm()
    return count


def run_job(
    plan: CpuPlan, folder: pathlib.Path, minutes: float, *, bursts_only: bool, records: pathlib.Path | None
) -> dict[str, Any]:
    """Run one job and its campaign, and copy its records to a folder; return rows, bursts and verdicts."""
    path = folder / f"{plan.job}.yaml"
    path.write_text(yaml.safe_dump(plan.manifest()), encoding="utf-8")
    deadline = time.monotonic() + minutes * 60
    call("delete", plan.job, "--ignore-not-found")
    call("run", str(path), "--detach")
    try:
        hub = hub_client(plan.job)
        disturber = CpuDisturber(plan) if _await_steps(hub) else None
        if disturber is None:
            raise SystemExit(f"job {plan.job} made no step within {START_S:.0f} s; see its logs")
        disturber.pin()
        campaign = FaultCampaign(hub, disturber, log=lambda line: print(f"{plan.layout:8} {line}", flush=True))
        planned = [] if bursts_only else disturbances(plan.world)
        over = campaign.run(planned, deadline=deadline) if planned else []
        begun = time.monotonic()
        bursts = burst(campaign, disturber, plan, deadline)
        rows = campaign.judge(over, least=LEAST)
    finally:
        if records:
            shutil.copytree(jobs_dir() / plan.job / "hub" / "traces", records / plan.layout)
        call("delete", plan.job)
    return {
        "layout": plan.layout,
        "rows": rows,
        "not_run": [each.name for each in planned if each not in over],
        "bursts": bursts,
        "burst_minutes": max(time.monotonic() - begun, 0.0) / 60,
        "verdicts": [dataclasses.asdict(found) for found in campaign.named.values()],
    }


def _await_steps(hub: httpx.Client) -> bool:
    """Wait for the first steps of a job; return false if there were none in time."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        progress = hub.get("/api/v1/summary").json()["progress"] or {}
        if (progress.get("iteration") or 0) >= FIRST // 10:
            return True
        time.sleep(POLL_S)
    return False


def call(*arguments: str) -> None:
    subprocess.run([*MEGATRONAPP, *arguments], check=True, stdout=subprocess.DEVNULL)


def assign(layouts: Sequence[str], cores: Sequence[int]) -> tuple[list[CpuPlan], set[int], bool]:
    """Return the jobs with the cores of their ranks, the cores of other processes, and whether jobs run at once."""
    sizes = [tensor * pipeline * data for tensor, pipeline, data in (LAYOUTS[layout] for layout in layouts)]
    at_once = len(cores) >= sum(size + 1 for size in sizes)
    plans, used = [], 0
    for layout, size in zip(layouts, sizes, strict=True):
        first = used if at_once else 0
        plans.append(CpuPlan(layout=layout, cores=tuple(cores[(first + rank) % len(cores)] for rank in range(size))))
        used += size
    taken = {core for plan in plans for core in plan.cores}
    return plans, set(cores) - taken or set(cores), at_once


def parse_cores(text: str) -> list[int]:
    """Read a list such as 0-3,8."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    missing = set(found) - os.sched_getaffinity(0)
    if missing:
        raise argparse.ArgumentTypeError(f"this process may not use the cores {sorted(missing)}; see nproc and taskset")
    return found


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=parse_cores, required=True, help="cores to use, such as 0-15 or 0,2,4")
    parser.add_argument(
        "--layouts", default=",".join(PUBLISHED), help=f"some of {', '.join(LAYOUTS)}; pp2 is for trials (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=8, help="of each job, its start included (%(default)s)")
    parser.add_argument("--bursts-only", action="store_true", help="only bursts, which are no fault")
    parser.add_argument(
        "--records", type=pathlib.Path, help="copy the records of jobs to this folder, for megatronapp scan analyze"
    )
    parser.add_argument("--output", type=pathlib.Path, help="write rows and verdicts to this file, as JSON")
    options = parser.parse_args()
    options.layouts = options.layouts.split(",")
    if unknown := set(options.layouts) - set(LAYOUTS):
        parser.error(f"unknown layouts: {', '.join(sorted(unknown))}; write some of {', '.join(LAYOUTS)}")
    return options


def report(results: Sequence[dict[str, Any]]) -> bool:
    """Print the results; return whether they are right."""
    right = True
    for result in results:
        print(f"\n{result['layout']}\n{table(result['rows'])}")
        if result["not_run"]:
            print(f"not run in the time given: {', '.join(result['not_run'])}")
        right &= is_right(result["rows"]) and not result["not_run"]
    minutes = sum(result["burst_minutes"] for result in results)
    alarms = sum(len(result["rows"][-1]["others"]) for result in results)
    print(f"\n{sum(result['bursts'] for result in results)} bursts in {minutes:.1f} minutes of jobs")
    print(f"{alarms} verdicts outside of disturbances")
    return right


def main() -> int:
    options = parse_options()
    plans, others, at_once = assign(options.layouts, options.cores)
    os.sched_setaffinity(0, others)  # what this process starts has them, too
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:

        def run(plan: CpuPlan) -> dict[str, Any]:
            return run_job(
                plan,
                pathlib.Path(folder),
                options.minutes,
                bursts_only=options.bursts_only,
                records=options.records,
            )

        with concurrent.futures.ThreadPoolExecutor(len(plans) if at_once else 1) as threads:
            results = list(threads.map(run, plans))
    right = report(results)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
