"""Crowds the processors under a training job on GPUs, and prints what the detector says of it.

    python bench/gpu_crowded_host.py --manifest bench/gpu_slow_rank_pp2.yaml

A rank whose processor is crowded launches kernels late: its device's spans grow, yet the device is healthy. First
rank 0 shares one processor with two busy loops, later every processor has three; at the end rank 1's device is slow
indeed. A verdict of cause "compute" before that, or another one at the end, is wrong: exit code 1.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.parse
from typing import Any

import httpx
import yaml

from megatronapp_common.names import Env

MEGATRONAPP = [sys.executable, "-m", "megatronapp_common.cli"]
JOB = "crowded"
STEPS = 400
FAULT = {"rank": 1, "kind": "compute", "factor": 2, "fromStep": 300, "steps": 60}
SINGLE_CPU, CALM, ALL_CPUS, CALM_AGAIN = 90, 130, 190, 240
"""Steps at which the crowding changes."""
DEADLINE_S = 500
POLL_S = 0.2


class Crowd:
    """Busy loops in parallel with the training."""

    def __init__(self) -> None:
        self._loops: list[subprocess.Popen[bytes]] = []
        self._cpus = os.sched_getaffinity(0)
        self._pinned: int | None = None

    def single_cpu(self) -> None:
        """Rank 0 and two loops share a processor."""
        self._pinned = process_of_rank(0)
        cpu = {min(self._cpus)}
        pin(self._pinned, cpu)
        for loop in self._start(2):
            os.sched_setaffinity(loop.pid, cpu)

    def all_cpus(self) -> None:
        """Three loops for every processor."""
        self._start(3 * len(self._cpus))

    def calm(self) -> None:
        """End all busy loops."""
        for loop in self._loops:
            loop.kill()
            loop.wait()
        self._loops.clear()
        if self._pinned is not None:
            pin(self._pinned, self._cpus)
            self._pinned = None

    def _start(self, count: int) -> list[subprocess.Popen[bytes]]:
        started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        self._loops += started
        return started


def process_of_rank(rank: int, job: str = JOB) -> int:
    """Return the process id of a rank of a job on this host. Raises SystemExit where it is not running."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = set((process / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        is_rank = f"RANK={rank}".encode() in environment and any(
            item.startswith(b"WORLD_SIZE=") for item in environment
        )
        if is_rank and f"{Env.JOB}={job}".encode() in environment:
            return int(process.name)
    raise SystemExit(f"rank {rank} of job {job} is not running")


def pin(process: int, cpus: set[int]) -> None:
    """Limit all threads of a process to processors; threads that they start later are, too."""
    for thread in pathlib.Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


def hub_client(job: str = JOB) -> httpx.Client:
    """Return a client of the hub of a job, logged in."""
    done = subprocess.run([*MEGATRONAPP, "ui", job, "--print"], check=True, capture_output=True, text=True)
    address = urllib.parse.urlsplit(done.stdout.strip())
    client = httpx.Client(base_url=f"{address.scheme}://{address.netloc}", timeout=30)
    client.post("/login", data={"token": address.fragment.removeprefix("code=")})
    return client


def watch(hub: httpx.Client, crowd: Crowd) -> list[dict[str, Any]]:
    """Change the crowding as the steps go by; return all verdicts that users could see."""
    plan = [(SINGLE_CPU, crowd.single_cpu), (CALM, crowd.calm), (ALL_CPUS, crowd.all_cpus), (CALM_AGAIN, crowd.calm)]
    verdicts: dict[str, dict[str, Any]] = {}
    deadline, step = time.monotonic() + DEADLINE_S, 0
    while step < FAULT["fromStep"] + FAULT["steps"] and time.monotonic() < deadline:  # type: ignore[operator]
        step = (hub.get("/api/v1/summary").json()["progress"] or {}).get("iteration") or 0
        for verdict in hub.get("/api/v1/verdicts").json():
            if verdict["state"] != "suspect" and verdict["id"] not in verdicts:
                print(f"step {step:4}  {verdict['sentence']}", flush=True)
                verdicts[verdict["id"]] = verdict
        if plan and step >= plan[0][0]:
            _, change = plan.pop(0)
            change()
            print(f"step {step:4}  -- {change.__name__.replace('_', ' ')}", flush=True)
        time.sleep(POLL_S)
    return list(verdicts.values())


def is_right(verdicts: list[dict[str, Any]]) -> bool:
    """A host in each crowd, and in the end the slow device alone."""
    hosts = [verdict["since"]["step"] for verdict in verdicts if verdict["cause"] == "host"]
    crowds = any(SINGLE_CPU <= step < CALM for step in hosts) and any(ALL_CPUS <= step < CALM_AGAIN for step in hosts)
    others = [verdict for verdict in verdicts if verdict["cause"] != "host"]
    return (
        crowds
        and [(other["cause"], other["subject"]["ranks"]) for other in others] == [(FAULT["kind"], [FAULT["rank"]])]
        and (
            others[0]["since"]["step"] >= FAULT["fromStep"] - 1  # type: ignore[operator]
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, help="write the verdicts to this file")
    options = parser.parse_args()
    manifest = yaml.safe_load(options.manifest.read_text(encoding="utf-8"))
    manifest["spec"]["training"]["trainIters"] = STEPS
    manifest["spec"]["faults"] = [FAULT]
    crowd = Crowd()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(manifest), encoding="utf-8")
        subprocess.run([*MEGATRONAPP, "run", str(path), "--name", JOB, "--detach"], check=True)
        try:
            verdicts = watch(hub_client(), crowd)
        finally:
            crowd.calm()
            subprocess.run([*MEGATRONAPP, "delete", JOB], check=True)
    if options.out:
        options.out.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    print("right" if is_right(verdicts) else "wrong")
    return 0 if is_right(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
