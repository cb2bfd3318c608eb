"""Disturbs a training job on two GPUs in several ways, one after the other, and prints what the detector says of each.

    CUDA_VISIBLE_DEVICES=0,1 python bench/gpu_faults.py --layout tensor --out faults_tensor.json

Layouts are TP2 with sequence parallel, PP2 and DP2. A disturbance lasts 35 steps, between healthy stretches of 30.
Other processes multiply matrices on a GPU, copy its memory, or copy from one GPU to the other; a kernel of known length
runs after each pass of a rank; a rank's host stalls; its process is stopped and continued. The truth of a cost is the
median step in the disturbance less that of the healthy steps before it. A disturbance that makes steps less than 3 %
longer may be named or not. Exit code 1 if another one is not named with its subject and cause, or a healthy subject is.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import yaml
from gpu_crowded_host import MEGATRONAPP, hub_client, process_of_rank

JOB = "crowded"
"""Name of the job: that of `gpu_crowded_host.hub_client`."""
MANIFEST = pathlib.Path(__file__).with_name("gpu_slow_rank_pp2.yaml")
LAYOUTS = {"tensor": (2, 1), "pipeline": (1, 2), "data": (1, 1)}
FIRST, HOLD, CALM = 70, 35, 30
LATE = 20
"""Steps after a disturbance in which its verdict still counts for it."""
LEAST = 0.03
POLL_S = 0.1
DEADLINE_S = 420.0
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


@dataclasses.dataclass(kw_only=True)
class Disturbance:
    """A way to slow the job, and what should be named for it."""

    name: str
    start: Callable[["GpuDisturber"], None]
    cause: str
    ranks: list[int] = dataclasses.field(default_factory=lambda: [1])
    begin: int = 0
    end: int = 0


class GpuDisturber:
    """Starts and ends disturbances."""

    def __init__(self, hub: httpx.Client) -> None:
        self._hub = hub
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fault: str | None = None
        self._stopping: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def compete(self, device: str, what: str, duty: float) -> None:
        """Use a GPU from another process, for a part of the time."""
        self._processes.append(subprocess.Popen([sys.executable, "-c", COMPETITOR, device, what, str(duty)]))

    def inject(self, kind: str, factor: float) -> None:
        """Let rank 1 slow itself, by a kernel after each pass or a stall before it."""
        step = (self._hub.get("/api/v1/summary").json()["progress"] or {}).get("iteration") or 0
        fault = {"rank": 1, "kind": kind, "factor": factor, "fromStep": step + 2, "steps": 10 * HOLD}
        answer = self._hub.post("/api/v1/faults", json=fault)
        answer.raise_for_status()
        self._fault = answer.json()["id"]

    def stop(self, duty: float, cycle_s: float) -> None:
        """Stop the process of rank 1 for a part of each cycle."""
        process, self._stopping = process_of_rank(1), threading.Event()
        stopping = self._stopping

        def run() -> None:
            while not stopping.is_set():
                os.kill(process, signal.SIGSTOP)
                time.sleep(duty * cycle_s)
                os.kill(process, signal.SIGCONT)
                time.sleep((1 - duty) * cycle_s)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def calm(self) -> None:
        """End what was started."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()
        if self._fault is not None:
            self._hub.delete(f"/api/v1/faults/{self._fault}").raise_for_status()
            self._fault = None
        if self._stopping is not None and self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._stopping = self._thread = None


def campaign() -> list[Disturbance]:
    """Return the disturbances in order."""
    found = [
        Disturbance(
            name="products, all of the time", start=lambda d: d.compete("cuda:1", "products", 1.0), cause="compute"
        ),
        Disturbance(name="products, 15 %", start=lambda d: d.compete("cuda:1", "products", 0.15), cause="compute"),
        Disturbance(name="memory copies, half", start=lambda d: d.compete("cuda:1", "memory", 0.5), cause="compute"),
        Disturbance(name="kernels after passes, 1.10", start=lambda d: d.inject("compute", 1.10), cause="compute"),
        Disturbance(name="kernels after passes, 1.05", start=lambda d: d.inject("compute", 1.05), cause="compute"),
        Disturbance(name="host stalls, 0.5 of a pass", start=lambda d: d.inject("host", 1.5), cause="host"),
        Disturbance(name="stopped half of 0.2 s", start=lambda d: d.stop(0.5, 0.2), cause="host"),
        Disturbance(
            name="copies from GPU 0 to 1", start=lambda d: d.compete("cuda:0", "peer", 1.0), cause="link", ranks=[0, 1]
        ),
    ]
    for number, disturbance in enumerate(found):
        disturbance.begin = FIRST + number * (HOLD + CALM)
        disturbance.end = disturbance.begin + HOLD
    return found


@dataclasses.dataclass(kw_only=True)
class Named:
    """A verdict: the step of the job at which it was first seen, and its newest state."""

    seen_at: int
    verdict: dict[str, Any]


def watch(hub: httpx.Client, planned: Sequence[Disturbance]) -> dict[str, Named]:
    """Disturb the job as its steps go by, and note the real begin and end; return all confirmed verdicts."""
    disturber = GpuDisturber(hub)
    named: dict[str, Named] = {}
    changes = [change for each in planned for change in ((each.begin, each, True), (each.end, each, False))]
    deadline, step = time.monotonic() + DEADLINE_S, 0
    try:
        while step < planned[-1].end + LATE and time.monotonic() < deadline:
            step = (hub.get("/api/v1/summary").json()["progress"] or {}).get("iteration") or 0
            for verdict in hub.get("/api/v1/verdicts").json():
                if verdict["state"] != "suspect":
                    known = named.get(verdict["id"])
                    if known is None:
                        print(f"step {step:4}  {verdict['sentence']}", flush=True)
                    named[verdict["id"]] = Named(seen_at=known.seen_at if known else step, verdict=verdict)
            if changes and step >= changes[0][0]:
                _, disturbance, begins = changes.pop(0)
                if begins:
                    disturbance.begin = step
                    disturbance.start(disturber)
                else:
                    disturbance.end = step
                    disturber.calm()
                print(f"step {step:4}  -- {disturbance.name} {'begins' if begins else 'ends'}", flush=True)
            time.sleep(POLL_S)
    finally:
        disturber.calm()
    return named


def is_of(named: Named, disturbance: Disturbance) -> bool:
    """Return true if a verdict began in a disturbance, or shortly after it."""
    since = named.verdict["since"]["step"]
    return bool(disturbance.begin - 1 <= since < disturbance.end + LATE)


def judged(hub: httpx.Client, planned: Sequence[Disturbance], named: dict[str, Named]) -> list[dict[str, Any]]:
    """Return one row of each disturbance, and one of verdicts that belong to none."""
    length_s = {step["step"]: step["durationNs"] * 1e-9 for step in hub.get("/api/v1/steps").json()}
    rows, left = [], dict(named)
    for each in planned:
        healthy = [length_s[step] for step in range(each.begin - CALM + 10, each.begin - 1) if step in length_s]
        slow = [length_s[step] for step in range(each.begin + 5, each.end) if step in length_s]
        cost_s = statistics.median(slow) - statistics.median(healthy) if healthy and slow else float("nan")
        row: dict[str, Any] = {"name": each.name, "step_s": statistics.median(healthy), "cost_s": cost_s}
        row["matters"] = cost_s > LEAST * statistics.median(healthy)
        row["others"] = []
        for name in [name for name, found in left.items() if is_of(found, each)]:
            found = left.pop(name)
            subject, effect = found.verdict["subject"], found.verdict["effect"]
            if sorted(subject["ranks"]) == each.ranks and found.verdict["cause"] == each.cause and "delay" not in row:
                row |= {"delay": found.seen_at - each.begin, "estimate_s": effect["secondsPerStep"]}
            else:
                row["others"].append(found.verdict["sentence"])
        rows.append(row)
    rows.append(
        {"name": "healthy steps", "matters": False, "others": [found.verdict["sentence"] for found in left.values()]}
    )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| disturbance | healthy step, s | longer by, s | named after, steps | estimate, s | else named |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        numbers = [f"{row[key]:.3f}" if key in row else "" for key in ("step_s", "cost_s")]
        delay = row.get("delay", "**not**" if row["matters"] else "")
        estimate = f"{row['estimate_s']:.3f}" if "estimate_s" in row else ""
        cells = [row["name"], *numbers, str(delay), estimate, "; ".join(row["others"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--out", type=pathlib.Path, help="write rows and verdicts to this file")
    options = parser.parse_args()
    tensor, pipeline = LAYOUTS[options.layout]
    planned = campaign()
    manifest = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    spec = manifest["spec"]
    del spec["faults"]
    spec["parallelism"] = {"tensor": tensor, "pipeline": pipeline, "data": 2 // (tensor * pipeline)}
    if tensor > 1:
        spec["parallelism"]["sequenceParallel"] = True
    spec["training"]["trainIters"] = planned[-1].end + 10 * LATE
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(manifest), encoding="utf-8")
        subprocess.run([*MEGATRONAPP, "run", str(path), "--name", JOB, "--detach"], check=True)
        try:
            hub = hub_client()
            named = watch(hub, planned)
            rows = judged(hub, planned, named)
        finally:
            subprocess.run([*MEGATRONAPP, "delete", JOB], check=True)
    print(options.layout)
    print(table(rows))
    if options.out:
        verdicts = [dataclasses.asdict(found) for found in named.values()]
        options.out.write_text(json.dumps({"rows": rows, "verdicts": verdicts}, indent=1), encoding="utf-8")
    right = all("delay" in row or not row["matters"] for row in rows) and not any(row["others"] for row in rows)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
