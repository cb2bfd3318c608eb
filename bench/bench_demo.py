"""Scores the whole product on real training: random faults and healthy stretches in warm jobs.

    python bench/bench_demo.py --jobs 4 --onsets 60 --stretches 60

Starts jobs like examples/demo.yaml through `megatronapp run --detach`, injects a random fault (rank, kind, factor) at a
random step through the hub's API, again and again, and reads the verdicts. A fault is named right if exactly its
subject (for a link: the pair) and cause are named while it acts. A healthy stretch is the time between two faults; it
is a false alarm if any verdict begins in it.
"""

import argparse
import dataclasses
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from typing import Any

import exact_bounds
import httpx
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
MEGATRONAPP = [sys.executable, "-m", "megatronapp_common.cli"]
KINDS = ("compute", "host", "link")
CAUSES = {"link": {"link", "nvlink-pcie"}}
"""Right causes of kinds that have several; others have their own name."""
WARM_STEPS = 16
"""Steps of a job before its first healthy stretch: warm-up, and the detector's shortest history."""
STRETCH_STEPS = 20
FAULT_STEPS = 15
AHEAD_STEPS = 6
"""Steps between the command and the onset, so that every rank has received it."""
SETTLE_STEPS = 18
"""Steps after a fault until its verdict has been cleared and nothing of it is left."""
POLL_S = 0.5
STALLED_S = 180


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoFault:
    rank: int
    kind: str
    factor: float
    first: int
    pairs: tuple[tuple[int, int], ...]

    def named_by(self, verdict: dict[str, Any]) -> bool:
        """Return true if a verdict names exactly this fault."""
        subject = verdict["subject"]
        if verdict["cause"] not in CAUSES.get(self.kind, {self.kind}):
            return False
        if self.kind == "link":
            return bool(subject["type"] == "link" and tuple(subject["ranks"]) in self.pairs)
        return bool(subject["type"] == "rank" and subject["ranks"] == [self.rank])


@dataclasses.dataclass(slots=True)
class Scores:
    """Results over all jobs."""

    onsets: list[tuple[DemoFault, list[str], bool, int | None]] = dataclasses.field(default_factory=list)
    """Fault, sentences said during it, named right, steps until the page could show it."""
    stretches: list[list[str]] = dataclasses.field(default_factory=list)
    """Sentences said in each healthy stretch."""


class JobError(Exception):
    """A job that does not start or does not get on."""


class DemoJob:
    """A running job and its hub."""

    def __init__(self, manifest: pathlib.Path, name: str) -> None:
        self.name = name
        call("delete", name, "--ignore-not-found")
        call("run", str(manifest), "--name", name, "--detach")
        address = urllib.parse.urlsplit(output("ui", name, "--print").strip())
        self._http = httpx.Client(base_url=f"{address.scheme}://{address.netloc}", timeout=30)
        self._http.post("/login", data={"token": address.fragment.removeprefix("code=")})
        self._seen: set[str] = set()

    def close(self) -> None:
        self._http.close()
        call("delete", self.name, "--ignore-not-found")

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, document: dict[str, Any]) -> None:
        self._http.post(path, json=document).raise_for_status()

    def step(self) -> int:
        """Newest step of the training; verdicts follow it within a second."""
        progress = self.get("/api/v1/summary")["progress"] or {}
        return int(progress.get("iteration") or 0)

    def new_verdicts(self) -> list[dict[str, Any]]:
        """Verdicts that were not there at the last call."""
        new = [
            verdict
            for verdict in self.get("/api/v1/verdicts")
            if verdict["state"] != "suspect" and verdict["id"] not in self._seen
        ]
        self._seen |= {verdict["id"] for verdict in new}
        return new

    def watch(self, until: int) -> tuple[list[dict[str, Any]], list[int]]:
        """New verdicts until a step has passed, and the step at which each was first seen. Raises JobError."""
        found: list[dict[str, Any]] = []
        seen_at: list[int] = []
        last, moved = self.step(), time.monotonic()
        while True:
            step = self.step()
            new = self.new_verdicts()
            found += new
            seen_at += [step] * len(new)
            if step >= until:
                return found, seen_at
            if step > last:
                last, moved = step, time.monotonic()
            elif time.monotonic() - moved > STALLED_S:
                raise JobError(f"job {self.name} made no step for {STALLED_S} s after step {step}; see its logs")
            time.sleep(POLL_S)


def main() -> None:
    options = parse_options()
    draw, scores = random.Random(options.seed), Scores()
    rounds = max(options.onsets, options.stretches)
    per_job = -(-rounds // options.jobs)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.jobs):
            count = min(per_job, rounds - number * per_job)
            if count > 0:
                run_job(pathlib.Path(folder), options.manifest, f"bench-demo-{number}", count, draw, scores)
    report(scores)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="jobs over which the onsets are spread")
    parser.add_argument("--onsets", type=int, default=60)
    parser.add_argument("--stretches", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--manifest", type=pathlib.Path, default=ROOT / "examples" / "demo.yaml")
    return parser.parse_args()


def run_job(  # noqa: PLR0917 - one call
    folder: pathlib.Path, manifest: pathlib.Path, name: str, rounds: int, draw: random.Random, scores: Scores
) -> None:
    """One warm job with `rounds` healthy stretches, each followed by a fault."""
    world, pipeline = write_manifest(folder / f"{name}.yaml", manifest, name, rounds)
    job = DemoJob(folder / f"{name}.yaml", name)
    try:
        job.watch(WARM_STEPS)
        for _ in range(rounds):
            healthy(job, scores)
            faulty(job, draw_fault(draw, world, pipeline), scores)
            job.watch(job.step() + SETTLE_STEPS)
    finally:
        job.close()


def write_manifest(path: pathlib.Path, source: pathlib.Path, name: str, rounds: int) -> tuple[int, int]:
    """The demonstration's job without its fault, long enough, on random tokens. Returns world and pipeline size."""
    manifest = yaml.safe_load(source.read_text(encoding="utf-8"))
    spec = manifest["spec"]
    manifest["metadata"]["name"] = name
    spec["faults"] = []
    spec.pop("checkpoint", None)
    spec["data"] = {"mock": True}
    spec["model"]["vocabSize"] = 4096
    spec["training"]["trainIters"] = WARM_STEPS + rounds * (STRETCH_STEPS + 2 * AHEAD_STEPS + FAULT_STEPS + 40)
    path.write_text(yaml.safe_dump(manifest, sort_keys=False), encoding="utf-8")
    return spec["nodes"] * spec["procPerNode"], spec["parallelism"]["pipeline"]


def draw_fault(draw: random.Random, world: int, pipeline: int) -> DemoFault:
    """Rank, kind and factor at random. With `first` 0: the step is chosen when it is injected."""
    rank = draw.randrange(world)
    stride = world // pipeline
    stage = rank // stride
    pairs = tuple((rank + (other - stage) * stride, rank) for other in (stage - 1, stage + 1) if 0 <= other < pipeline)
    kinds = KINDS if len(pairs) == 1 else KINDS[:2]
    return DemoFault(rank=rank, kind=draw.choice(kinds), factor=round(draw.uniform(2.0, 3.0), 2), first=0, pairs=pairs)


def healthy(job: DemoJob, scores: Scores) -> None:
    found, _ = job.watch(job.step() + STRETCH_STEPS)
    scores.stretches.append([verdict["sentence"] for verdict in found])
    print(f"healthy  {'ok' if not found else 'FALSE ALARM ' + found[0]['sentence']}", flush=True)


def faulty(job: DemoJob, drawn: DemoFault, scores: Scores) -> None:
    fault = dataclasses.replace(drawn, first=job.step() + AHEAD_STEPS)
    job.post(
        "/api/v1/faults",
        {
            "rank": fault.rank,
            "kind": fault.kind,
            "factor": fault.factor,
            "fromStep": fault.first,
            "steps": FAULT_STEPS,
        },
    )
    found, seen_at = job.watch(fault.first + FAULT_STEPS + AHEAD_STEPS)
    right = len(found) == 1 and fault.named_by(found[0]) and found[0]["since"]["step"] >= fault.first - 1
    delay = seen_at[0] - fault.first if right else None
    scores.onsets.append((fault, [verdict["sentence"] for verdict in found], right, delay))
    named = "; ".join(verdict["sentence"] for verdict in found) or "nothing"
    mark = "right" if right else "WRONG"
    print(f"{mark:8} rank {fault.rank} {fault.kind} x{fault.factor} from {fault.first}: {named}", flush=True)


def report(scores: Scores) -> None:
    print("\n| kind | named right |\n|---|---|")
    for kind in (*KINDS, "all"):
        rights = [right for fault, _, right, _ in scores.onsets if kind in (fault.kind, "all")]
        print(f"| {kind} | {exact_bounds.with_bounds(sum(rights), len(rights))} |")
    alarms = sum(bool(stretch) for stretch in scores.stretches)
    print(f"| false alarms, {STRETCH_STEPS} steps each | {exact_bounds.with_bounds(alarms, len(scores.stretches))} |")
    delays = [delay for *_, delay in scores.onsets if delay is not None]
    if delays:
        print(
            f"\nsteps from onset until the page could show it: median {statistics.median(delays)}, most {max(delays)}"
        )
    wrong = [onset for onset in scores.onsets if not onset[2]]
    print(json.dumps([{"fault": dataclasses.asdict(fault), "said": stretch} for fault, stretch, *_ in wrong], indent=1))


def call(*arguments: str) -> None:
    subprocess.run([*MEGATRONAPP, *arguments], check=True, stdout=subprocess.DEVNULL)


def output(*arguments: str) -> str:
    return subprocess.run([*MEGATRONAPP, *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
