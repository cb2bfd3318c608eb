"""A hub under the load of many agents: nothing may be lost, the lag must stay under a second, memory must stay flat.

A hub process as a job has it, with the detector and stored traces, and the agents' side of the protocol from this
process: 64 agents of one rank each (PP 8 x DP 8), 10 steps a second, 8 microbatches. The hub's own memory limits are
filled early with --hold, so that growth after that is a leak. Exit code 1 if a goal is missed.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import psutil
import websockets.asyncio.client
from numpy.typing import NDArray

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import Env
from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, RECORD, Flag, RecordKind
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret

PIPELINE = 8
MICROBATCHES = 8
LAG_GOAL_S = 1.0
GROWTH_GOAL = 1.10
PASS_NS = 4_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Load that the agents produce."""

    agents: int
    steps_per_s: float
    seconds: float

    @property
    def data(self) -> int:
        return self.agents // PIPELINE

    @property
    def steps(self) -> int:
        return int(self.seconds * self.steps_per_s)


def ring_header(rank: int, load: Load) -> dict[str, Any]:
    """RING frame of one rank; slots: 0 from the stage before, 1 to the next, 2 from the next, 3 to the stage before."""
    stage, replica = divmod(rank, load.data)
    before, after = rank - load.data, rank + load.data
    pairs = [[before, rank], [rank, after], [after, rank], [rank, before]]
    members = {slot: pair for slot, pair in enumerate(pairs) if all(0 <= member < load.agents for member in pair)}
    layout = {"tensor": 1, "pipeline": PIPELINE, "virtualPipeline": 1, "data": load.data, "context": 1, "expert": 1}
    metadata = {
        "rank": rank,
        "localRank": 0,
        "worker": rank,
        "node": f"node-{rank}",
        "world": load.agents,
        "layout": layout,
        "coordinates": {"tp": 0, "cp": 0, "ep": 0, "dp": replica, "pp": stage},
        "comms": [{"slot": slot, "kind": "p2p", "members": pair} for slot, pair in members.items()],
        "device": "cpu",
    }
    pair = [time.monotonic_ns(), time.time_ns()]
    return {
        "rank": rank,
        "worker": rank,
        "metadata": metadata,
        "bootId": "one",
        "clockPairs": [pair],
        "capacity": 65536,
    }


def template(rank: int, load: Load) -> NDArray[np.void]:
    """Records of one step that starts at 0: per microbatch two passes and up to eight halves of transfers."""
    stage = rank // load.data
    rows: list[dict[str, int]] = []
    clock = 0
    for microbatch in range(MICROBATCHES):
        for kind, source, target in ((RecordKind.FORWARD, 0, 1), (RecordKind.BACKWARD, 2, 3)):
            first, last = (
                (stage == 0, stage == PIPELINE - 1)
                if kind == RecordKind.FORWARD
                else (stage == PIPELINE - 1, stage == 0)
            )
            if not first:
                rows += transfer(source, microbatch, clock, (RecordKind.RECV_POST, RecordKind.RECV_WAIT))
            rows.append({"kind": kind, "start_ns": clock + 200_000, "duration": PASS_NS // 8, "microbatch": microbatch})
            clock += PASS_NS + 400_000
            if not last:
                rows += transfer(target, microbatch, clock, (RecordKind.SEND_POST, RecordKind.SEND_WAIT))
    rows.append({"kind": RecordKind.OPTIMIZER, "start_ns": clock, "duration": 100_000})
    rows.append({"kind": RecordKind.STEP, "start_ns": 0, "duration": (clock + 900_000) // 8})
    out = np.zeros(len(rows), RECORD)
    out["comm"], out["microbatch"] = NO_COMM, NO_MICROBATCH
    for row, fields in zip(out, rows, strict=True):
        for name, value in fields.items():
            row[name] = value
    return out


def transfer(slot: int, ordinal: int, clock: int, kinds: tuple[RecordKind, RecordKind]) -> list[dict[str, int]]:
    """Post and wait of one half of a message."""
    post = {"kind": kinds[0], "start_ns": clock, "duration": 500, "comm": slot, "ordinal": ordinal}
    wait = {"kind": kinds[1], "start_ns": clock + 10_000, "duration": 10_000, "comm": slot, "ordinal": ordinal}
    return [post | {"aux": 4096, "flags": Flag.AUX_BYTES}, wait]


class Agent:
    """One agent with one rank."""

    def __init__(self, rank: int, load: Load) -> None:
        self.rank = rank
        self.load = load
        self.template = template(rank, load)
        self.sent = 0
        self._random = np.random.default_rng(rank)

    def step(self, step: int) -> NDArray[np.void]:
        """The template now, with a little noise in the passes."""
        records = self.template.copy()
        records["step"] = step
        length_ns = int(self.template["duration"][-1]) * 8
        records["start_ns"] += np.uint64(time.monotonic_ns() - length_ns)
        passes = records["microbatch"] != NO_MICROBATCH
        noise = self._random.normal(1.0, 0.01, int(passes.sum())).clip(0.9, 1.05)
        records["duration"][passes] = (records["duration"][passes] * noise).astype(np.uint32)
        return records

    async def run(self, url: str, token: str, began_s: float) -> None:
        """Send steps on time, and a status every half second."""
        async with websockets.asyncio.client.connect(
            url, additional_headers={"Authorization": f"Bearer {token}"}, proxy=None, compression=None
        ) as socket:
            hello = {"job": "bench", "uid": "bench", "attempt": 0, "worker": self.rank, "node": "", "protocol": 1}
            await socket.send(frames.encode(Frame(FrameType.HELLO, hello)))
            await socket.recv()
            await socket.send(frames.encode(Frame(FrameType.RING, ring_header(self.rank, self.load))))
            for step in range(self.load.steps):
                await asyncio.sleep(max(0.0, began_s + step / self.load.steps_per_s - time.monotonic()))
                await self.send_step(socket, step)
            await socket.send(frames.encode(Frame(FrameType.BYE, {"reason": "done"})))

    async def send_step(self, socket: websockets.asyncio.client.ClientConnection, step: int) -> None:
        records = self.step(step)
        header = {"rank": self.rank, "worker": self.rank, "first": self.sent, "lost": 0}
        await socket.send(frames.encode(Frame(FrameType.RECORDS, header, records.tobytes())))
        self.sent += len(records)
        if step % max(1, int(self.load.steps_per_s / 2)) == 0:
            now_ns = time.monotonic_ns()
            ring = {"rank": self.rank, "heartbeatNs": now_ns, "nowNs": now_ns, "openSpan": None, "lost": 0}
            status = {"rings": [ring | {"closed": False, "alive": True}], "progress": None, "buffered": 0, "dropped": 0}
            await socket.send(frames.encode(Frame(FrameType.STATUS, status)))


@contextlib.asynccontextmanager
async def hub_process(
    folder: pathlib.Path, secret: str, hold: int, frontend: pathlib.Path | None = None
) -> AsyncIterator[tuple[psutil.Process, str]]:
    """A hub with its default limits but for the number of steps held in full, and with a page if one is built."""
    (folder / "secret").write_text(secret)
    (folder / "job.json").write_text(json.dumps({"metadata": {"name": "bench", "uid": "bench"}, "spec": {}}))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = ["-m", "megatronapp_analyzer.hub", "--port", str(port), "--job-file", str(folder / "job.json")]
    command += ["--state-dir", str(folder / "hub"), "--hold-steps", str(hold)]
    if frontend is not None:
        command += ["--frontend", str(frontend)]
    environment = os.environ | {Env.SECRET_FILE.value: str(folder / "secret")}
    process = await asyncio.create_subprocess_exec(sys.executable, *command, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        await wait_until_ready(url)
        yield psutil.Process(process.pid), url
    finally:
        process.terminate()
        await process.wait()


async def wait_until_ready(url: str) -> None:
    async with asyncio.timeout(120), httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


def run_delay_s(pid: int) -> float:
    """Seconds that threads of a process were ready but got no processor, summed (schedstat)."""
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[1]) for path in tasks) * 1e-9


@dataclasses.dataclass
class Latencies:
    """Readings of the hub, once a second."""

    lag_s: list[float] = dataclasses.field(default_factory=list)
    memory_bytes: list[int] = dataclasses.field(default_factory=list)
    cpu_s: float = 0.0
    starved_s: float = 0.0

    async def watch(self, process: psutil.Process, client: httpx.AsyncClient) -> None:
        """Sample the hub until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            tracer = (await client.get("/api/v1/tracer")).json()
            if tracer["lagSeconds"] is not None:
                self.lag_s.append(tracer["lagSeconds"])
            self.read(process)

    def read(self, process: psutil.Process) -> None:
        """Memory now and processor time so far."""
        self.memory_bytes.append(process.memory_info().rss)
        times = process.cpu_times()
        self.cpu_s = times.user + times.system
        self.starved_s = run_delay_s(process.pid)


async def measure(load: Load, hold: int) -> dict[str, Any]:
    """One run; the figures by name."""
    secret, samples = new_secret(), Latencies()
    agents = [Agent(rank, load) for rank in range(load.agents)]
    headers = {"Authorization": f"Bearer {derive_token(secret, TokenRole.VIEWER)}"}
    with tempfile.TemporaryDirectory() as name:
        async with (
            hub_process(pathlib.Path(name), secret, hold) as (process, url),
            httpx.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False) as client,
        ):
            watch = asyncio.create_task(samples.watch(process, client))
            socket_url = url.replace("http", "ws") + "/api/v1/agent"
            began_s = time.monotonic() + 1.0
            token = derive_token(secret, TokenRole.AGENT)
            await asyncio.gather(*(agent.run(socket_url, token, began_s) for agent in agents))
            took_s = time.monotonic() - began_s
            await wait_for_steps(client, load.steps)
            if watch.done():
                watch.result()
            watch.cancel()
            samples.read(process)
            summary = (await client.get("/api/v1/summary")).json()
            steps = (await client.get("/api/v1/steps")).json()
            text = (await client.get("/metrics")).text
    received = float(next(line.split()[-1] for line in text.splitlines() if line.startswith("megascan_records_total")))
    skipped = float(
        next(line.split()[-1] for line in text.splitlines() if line.startswith("megascan_analyzer_skipped_steps_total"))
    )
    return {
        "agents": load.agents,
        "steps": load.steps,
        "steps per second": round(load.steps / took_s, 2),
        "records sent": sum(agent.sent for agent in agents),
        "records received": int(received),
        "steps complete": sum(step["complete"] for step in steps),
        "records lost": summary["tracer"]["lost"],
        "steps not judged": int(skipped),
        "verdicts on a healthy job": len(summary["slowRanks"] or ()),
        "lag median s": round(float(np.median(samples.lag_s)), 3),
        "lag max s": round(max(samples.lag_s), 3),
        "hub processor ms per step": round(samples.cpu_s / load.steps * 1000, 1),
        "hub ready but without a processor, share": round(samples.starved_s / took_s, 2),
        "load average of the machine": round(os.getloadavg()[0], 1),
        "memory MiB": [value >> 20 for value in samples.memory_bytes[:: max(1, len(samples.memory_bytes) // 12)]],
        "memory growth, last third over middle third": round(growth(samples.memory_bytes), 3),
    }


def growth(memory_bytes: list[int]) -> float:
    """Median of the last third over that of the middle third."""
    third = max(1, len(memory_bytes) // 3)
    return float(np.median(memory_bytes[-third:]) / np.median(memory_bytes[third : 2 * third] or memory_bytes[:third]))


async def wait_for_steps(client: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(60):
        while len((await client.get("/api/v1/steps")).json()) < count:
            await asyncio.sleep(0.2)


def missed_goals(figures: dict[str, Any]) -> list[str]:
    missed = []
    if figures["records sent"] != figures["records received"] or figures["records lost"]:
        missed.append("records were lost")
    if figures["steps complete"] != figures["steps"]:
        missed.append("steps are incomplete")
    if figures["lag max s"] >= LAG_GOAL_S:
        missed.append(f"lag reached {figures['lag max s']} s, goal {LAG_GOAL_S}")
    if figures["memory growth, last third over middle third"] > GROWTH_GOAL:
        missed.append(f"memory grew by more than {GROWTH_GOAL:.0%}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--steps-per-second", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hold", type=int, default=100, help="steps that the hub holds in full (default: %(default)s)")
    arguments = parser.parse_args()
    load = Load(agents=arguments.agents, steps_per_s=arguments.steps_per_second, seconds=arguments.seconds)
    figures = asyncio.run(measure(load, arguments.hold))
    for name, value in figures.items():
        print(f"{name:44} {value}")
    missed = missed_goals(figures)
    print("all goals met" if not missed else "missed: " + "; ".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
