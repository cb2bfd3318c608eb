"""Disturbs a training job on GPUs in several ways, one after the other, and prints what the detector says of each.

    CUDA_VISIBLE_DEVICES=0,1 python bench/gpu_faults.py --layout tensor --out faults_tensor.json
    python bench/gpu_faults.py --layout tensor-data --out faults_tensor_data.json    # four GPUs
    python bench/gpu_faults.py --layout single --only stalls stopped shared garbage  # one GPU

Layouts are TP2 with sequence parallel, PP2 and DP2, on four GPUs TP2 x DP2 and PP4, and a single rank, of which only
the host is to be disturbed: without other ranks, slow compute is that of the whole job. A disturbance lasts 25 steps,
between healthy stretches of 25, and is about ranks 1 and 0 in turns; a single rank is healthy for 65 steps, as a fault
that returns to a rank within 60 steps is one that stops and starts. Other processes multiply matrices on a GPU, copy
its memory, or copy from one GPU to the other; a kernel of known length runs after each pass of a rank; a rank's host
stalls; its process is stopped and continued, shares its processor with busy loops, or collects a large heap of garbage
in its passes. The truth of a cost is the median step in the disturbance less that of the healthy steps before it. A
disturbance that makes steps less than 3 % longer may be named or not. Exit code 1 if another one is not named with its
subject and cause, or a healthy subject is.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import yaml
from fault_campaign import (
    BUSY,
    LATE,
    Disturbance,
    FaultCampaign,
    ProcessDisturber,
    collecting_environment,
    is_right,
    newest_step,
    table,
)
from gpu_crowded_host import MEGATRONAPP, hub_client, pin, process_of_rank

from megatronapp_common.state import jobs_dir

JOB = "crowded"
"""Name of the job: that of `gpu_crowded_host.hub_client`."""
MANIFEST = pathlib.Path(__file__).with_name("gpu_slow_rank_pp2.yaml")
LAYOUTS = {
    "tensor": (2, 1, 1),
    "pipeline": (1, 2, 1),
    "data": (1, 1, 2),
    "single": (1, 1, 1),
    "tensor-data": (2, 1, 2),
    "pipeline-4": (1, 4, 1),
}
"""Sizes of the tensor, pipeline and data-parallel groups."""
FIRST, HOLD, CALM, CALM_OF_SINGLE = 35, 25, 25, 65
HIDDEN, LENGTH = 4096, 4096
SAMPLES = {"tensor": 4, "pipeline": 2, "data": 2, "single": 2, "tensor-data": 4, "pipeline-4": 2}
"""Hidden size, tokens of a sample and samples of a microbatch, with which devices decide the length of passes.

Hosts that take 3 ms to launch a layer would, with smaller ones, and then no disturbance of a device matters.
"""
LEAST = 0.03
COMPETITOR = """
import sys, time, torch
device, what, duty = sys.argv[1], sys.argv[2], float(sys.argv[3])
a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
big = torch.empty(1 << 28, device=device)
other = torch.empty(1 << 28, device="cuda:1") if what == "peer" else torch.empty_like(big)
while True:
    begun = time.perf_counter()
    for _ in range(8):
        a @ a if what == "products" else other.copy_(big, non_blocking=True)
    torch.cuda.synchronize(device)
    time.sleep((time.perf_counter() - begun) * (1 / duty - 1))
"""


class GpuDisturber(ProcessDisturber):
    """Disturbs devices, too, and lets the job slow itself."""

    def __init__(self, hub: httpx.Client) -> None:
        super().__init__()
        self._hub = hub
        self._fault: str | None = None
        self._crowded: int | None = None

    def compete(self, rank: int, what: str, duty: float) -> None:
        """Use the GPU of a rank from another process, for a part of the time."""
        self.run([sys.executable, "-c", COMPETITOR, f"cuda:{rank}", what, str(duty)])

    def inject(self, rank: int, kind: str, factor: float) -> None:
        """Let a rank slow itself, by a kernel after each pass or a stall before it."""
        step = newest_step(self._hub)
        fault = {"rank": rank, "kind": kind, "factor": factor, "fromStep": step + 2, "steps": 10 * HOLD}
        answer = self._hub.post("/api/v1/faults", json=fault)
        answer.raise_for_status()
        self._fault = answer.json()["id"]

    def stop(self, rank: int, duty: float, cycle_s: float) -> None:
        """Stop the process of a rank for a part of each cycle."""
        self.stop_processes([process_of_rank(rank)], duty, cycle_s)

    def crowd(self, rank: int, loops: int) -> None:
        """Let a rank share a single processor with busy loops."""
        self._crowded = process_of_rank(rank)
        cpu = {min(os.sched_getaffinity(0))}
        pin(self._crowded, cpu)
        for _ in range(loops):
            os.sched_setaffinity(self.run([sys.executable, "-c", BUSY]).pid, cpu)

    def calm(self) -> None:
        """End what was started."""
        super().calm()
        if self._crowded is not None:
            pin(self._crowded, os.sched_getaffinity(0))
            self._crowded = None
        if self._fault is not None:
            self._hub.delete(f"/api/v1/faults/{self._fault}").raise_for_status()
            self._fault = None


def disturbances(chosen: Sequence[str], ranks: int) -> list[Disturbance[GpuDisturber]]:
    """Return the disturbances whose name contains one of these texts, in order, of ranks 1 and 0 in turns."""
    apart = HOLD + (CALM if ranks > 1 else CALM_OF_SINGLE)
    kinds: list[tuple[str, str, str, Callable[[GpuDisturber, int], None]]] = [
        ("products, all of the time", "compute", "", lambda d, rank: d.compete(rank, "products", 1.0)),
        ("products, 15 %", "compute", "", lambda d, rank: d.compete(rank, "products", 0.15)),
        # Processes that take turns on a device slow all of its work.
        ("memory copies, half", "memory", "compute", lambda d, rank: d.compete(rank, "memory", 0.5)),
        ("kernels after passes, 1.10", "compute", "", lambda d, rank: d.inject(rank, "compute", 1.10)),
        ("kernels after passes, 1.05", "compute", "", lambda d, rank: d.inject(rank, "compute", 1.05)),
        ("host stalls, 0.5 of a pass", "host", "", lambda d, rank: d.inject(rank, "host", 1.5)),
        ("stopped half of 0.2 s", "host", "", lambda d, rank: d.stop(rank, 0.5, 0.2)),
        ("processor shared with 2 loops", "host", "", lambda d, rank: d.crowd(rank, 2)),
        ("garbage collections every 0.3 s", "host", "", lambda d, rank: d.collect(process_of_rank(rank), 0.3)),
        ("copies from GPU 0 to 1", "nvlink-pcie", "", lambda d, rank: d.compete(0, "peer", 1.0)),
    ]
    kinds = [kind for kind in kinds if any(part in kind[0] for part in chosen)]
    found = []
    for number, (name, cause, also, start) in enumerate(kinds):
        rank, begin = (number + 1) % min(ranks, 2), FIRST + number * apart
        found.append(
            Disturbance(
                name=name,
                start=functools.partial(_start, start, rank),
                cause=cause,
                also=also,
                subjects=[[0, 1]] if name.startswith("copies") else [[rank]],
                begin=begin,
                end=begin + HOLD,
            )
        )
    return found


def _start(start: Callable[[GpuDisturber, int], None], rank: int, disturber: GpuDisturber) -> None:
    start(disturber, rank)


def manifest_of(options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Return the manifest of the job."""
    tensor, pipeline, data = LAYOUTS[options.layout]
    manifest: dict[str, Any] = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    spec = manifest["spec"]
    del spec["faults"]
    spec["procPerNode"] = spec["gpusPerNode"] = tensor * pipeline * data
    spec["parallelism"] = {"tensor": tensor, "pipeline": pipeline, "data": data}
    if tensor > 1:
        spec["parallelism"]["sequenceParallel"] = True
    spec["model"] |= {"hiddenSize": HIDDEN, "numAttentionHeads": HIDDEN // 128, "seqLength": LENGTH}
    spec["training"] |= {"microBatchSize": SAMPLES[options.layout], "globalBatchSize": options.global_batch}
    spec["training"]["trainIters"] = steps
    spec["env"] = [collecting_environment()]
    return manifest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--out", type=pathlib.Path, help="write rows and verdicts to this file")
    parser.add_argument("--only", nargs="+", default=[""], help="disturbances whose name contains one of these texts")
    parser.add_argument("--minutes", type=float, default=7.0, help="of the job, without its start (%(default)s)")
    parser.add_argument("--global-batch", type=int, default=16, help="samples of a step (%(default)s)")
    parser.add_argument(
        "--records", type=pathlib.Path, help="copy the job's records to this folder, for megatronapp scan analyze"
    )
    options = parser.parse_args()
    planned = disturbances(options.only, math.prod(LAYOUTS[options.layout]))
    manifest = manifest_of(options, steps=planned[-1].end + 10 * LATE)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(manifest), encoding="utf-8")
        subprocess.run([*MEGATRONAPP, "run", str(path), "--name", JOB, "--detach"], check=True)
        try:
            hub = hub_client()
            campaign = FaultCampaign(hub, GpuDisturber(hub))
            over = campaign.run(planned, deadline=time.monotonic() + 60 * options.minutes)
            rows = campaign.judge(over, least=LEAST)
        finally:
            for part in ("traces", "store"):  # the records of an hour that is over are in the store
                stored = jobs_dir() / JOB / "hub" / part
                if options.records and stored.exists():
                    shutil.copytree(stored, options.records / part, dirs_exist_ok=True)
            subprocess.run([*MEGATRONAPP, "delete", JOB], check=True)
    print(options.layout)
    print(table(rows))
    if options.out:
        verdicts = [dataclasses.asdict(found) for found in campaign.named.values()]
        options.out.write_text(json.dumps({"rows": rows, "verdicts": verdicts}, indent=1), encoding="utf-8")
    missed = [each.name for each in planned if each not in over]
    if missed:
        print(f"not run within {options.minutes:.1f} minutes: {', '.join(missed)}")
    return 0 if is_right(rows) and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
