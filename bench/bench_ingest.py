"""Records a second that the hub's ingest takes, from frames in memory to finished steps, at the size of a large job.

    python bench/bench_ingest.py                     # 16,384 ranks, 6.4 million records a step, about 2 GB
    python bench/bench_ingest.py --data 8 --steps 4  # 1,024 ranks
    python bench/bench_ingest.py --data 8 --sockets  # through the sockets of a hub process, which also stores traces

One thread, without sockets and disks; times are of the processor. `merged` are the records of a step, sorted by rank
and start, which one native call does; `ingest` is the whole way of a step from encoded frames, decoding and digest
included. Clocks and detector are not: a process next to the hub does that work.
"""

import argparse
import asyncio
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import bench_hub
import httpx
import numpy as np
import websockets.asyncio.client
from numpy.typing import NDArray

from megatronapp_analyzer.hub.ingest.assembly import with_ranks
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_common.frames import Frame, FrameType, decode, encode
from megatronapp_common.trace import RECORD_BYTES
from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret

TENSOR, PIPELINE = 8, 16
STEP_NS = 5_000_000_000


def ring_header(rank: int, data: int) -> dict[str, Any]:
    """Return the RING header of a rank; workers have 8 ranks and clocks of their own."""
    stage_size = TENSOR * data
    stage, place = divmod(rank, stage_size)
    world = PIPELINE * stage_size
    pairs = [(rank - stage_size, rank), (rank, rank + stage_size), (rank + stage_size, rank), (rank, rank - stage_size)]
    comms = [
        {"slot": slot, "kind": "p2p", "members": list(pair)}
        for slot, pair in enumerate(pairs)
        if min(pair) >= 0 and max(pair) < world
    ]
    first = stage * stage_size + place % TENSOR
    comms.append({"slot": len(pairs), "kind": "dp", "members": list(range(first, first + stage_size, TENSOR))})
    worker = rank // 8
    return {
        "rank": rank,
        "worker": worker,
        "metadata": {
            "rank": rank,
            "localRank": rank % 8,
            "worker": worker,
            "node": f"node-{worker}",
            "world": world,
            "layout": {"tensor": TENSOR, "pipeline": PIPELINE, "data": data},
            "coordinates": {"tp": place % TENSOR, "cp": 0, "ep": 0, "dp": place // TENSOR, "pp": stage},
            "comms": comms,
            "device": "cuda",
        },
        "bootId": f"boot-{worker}",
        "clockPairs": [[0, time.time_ns()]],
        "capacity": 65536,
    }


def bodies(templates: list[NDArray[np.void]], step: int) -> list[bytes]:
    """Return the frames' bodies of a step, one of each stage, whose ranks send the same."""
    found = []
    for template in templates:
        records = template.copy()
        records["step"] = step
        records["start_ns"] += np.uint64(step * STEP_NS)
        found.append(records.tobytes())
    return found


def encoded_frame(rank: int, step: int, body: bytes) -> bytes:
    """Return the RECORDS frame of a rank and step, as its agent sends it."""
    header = {"rank": rank, "worker": rank // 8, "first": step * (len(body) // RECORD_BYTES), "lost": 0}
    return encode(Frame(FrameType.RECORDS, header, body))


async def send_worker(
    url: str, token: str, rings: list[dict[str, Any]], frames: list[list[bytes]], ready: "Ready"
) -> None:
    """Send the frames of all steps of a worker, once the rings of all workers are announced."""
    async with websockets.asyncio.client.connect(
        url, additional_headers={"Authorization": f"Bearer {token}"}, proxy=None, compression=None, max_queue=None
    ) as connection:
        hello = {"job": "bench", "uid": "bench", "attempt": 0, "worker": rings[0]["worker"], "node": "", "protocol": 1}
        await connection.send(encode(Frame(FrameType.HELLO, hello)))
        await connection.recv()
        for ring in rings:
            await connection.send(encode(Frame(FrameType.RING, ring)))
        await ready.wait()
        for step in frames:
            for frame in step:
                await connection.send(frame)
        await ready.finished.wait()


class Ready:
    """Barrier of all workers before the first frame, and the end of the measurement after the last."""

    def __init__(self, workers: int) -> None:
        self._barrier = asyncio.Barrier(workers)
        self.finished = asyncio.Event()
        self.begun_s = 0.0
        self.on_begin: Callable[[], None] = lambda: None

    async def wait(self) -> None:
        await self._barrier.wait()
        if not self.begun_s:
            self.begun_s = time.monotonic()
            self.on_begin()


async def through_sockets(templates: list[NDArray[np.void]], data: int, steps: int) -> None:
    """Send all steps as fast as a hub takes them; print its records per second of processor and of wall time."""
    world, stage_size = TENSOR * PIPELINE * data, TENSOR * data
    bodies_of = [bodies(templates, step) for step in range(steps)]
    secret = new_secret()
    ready = Ready(world // 8)
    with tempfile.TemporaryDirectory() as name:
        async with bench_hub.hub_process(pathlib.Path(name), secret, steps) as (process, url):
            cpu_before: list[float] = []
            ready.on_begin = lambda: cpu_before.append(sum(process.cpu_times()[:2]))
            token, address = derive_token(secret, TokenRole.AGENT), url.replace("http", "ws") + "/api/v1/agent"
            sending = []
            for worker in range(world // 8):
                frames = [
                    [encoded_frame(rank, step, found[rank // stage_size]) for rank in range(worker * 8, worker * 8 + 8)]
                    for step, found in enumerate(bodies_of)
                ]
                rings = [ring_header(rank, data) for rank in range(worker * 8, worker * 8 + 8)]
                sending.append(asyncio.create_task(send_worker(address, token, rings, frames, ready)))
            headers = {"Authorization": f"Bearer {derive_token(secret, TokenRole.VIEWER)}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, trust_env=False) as client:
                while len(found := (await client.get("/api/v1/steps")).json()) < steps:
                    await asyncio.sleep(0.05)
            wall_s, cpu_s = time.monotonic() - ready.begun_s, sum(process.cpu_times()[:2]) - cpu_before[0]
            ready.finished.set()
            await asyncio.gather(*sending)
    assert all(step["complete"] for step in found)
    records = steps * stage_size * sum(map(len, templates))
    print(f"{world} ranks on {world // 8} connections, {records / 1e6:.2f} million records in {steps} steps")
    print(f"hub: {records / cpu_s / 1e6:.2f} million records a second of its processor time")
    print(f"hub and senders on one machine: {records / wall_s / 1e6:.2f} million records a second of wall time")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=int, default=128, help="data-parallel size (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=41, help="of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps to take (default: %(default)s)")
    parser.add_argument("--sockets", action="store_true", help="through a hub process and its sockets")
    options = parser.parse_args()
    bench_hub.PIPELINE, bench_hub.MICROBATCHES = PIPELINE, options.microbatches
    world, stage_size = TENSOR * PIPELINE * options.data, TENSOR * options.data
    load = bench_hub.Load(agents=world, steps_per_s=0.2, seconds=0)
    templates = [bench_hub.template(stage * stage_size, load) for stage in range(PIPELINE)]
    if options.sockets:
        asyncio.run(through_sockets(templates, options.data, options.steps))
        return 0
    ingest = TraceIngest(StoreLimits(full_bytes=1 << 30), aligns=False)
    for rank in range(world):
        ingest.add_ring(0, ring_header(rank, options.data))
    rates: dict[str, list[float]] = {"merged": [], "ingest": []}
    for step in range(options.steps):
        frames = bodies(templates, step)
        parts = [(rank, np.frombuffer(frames[rank // stage_size], templates[0].dtype)) for rank in range(world)]
        begun_s = time.process_time()
        records = len(with_ranks(parts))
        rates["merged"].append(records / (time.process_time() - begun_s))
        finished = 0
        encoded = [encoded_frame(rank, step, frames[rank // stage_size]) for rank in range(world)]
        begun_s = time.process_time()
        for raw in encoded:
            frame = decode(raw)
            finished += len(ingest.add_records(0, frame.header, frame.body).finished)
        rates["ingest"].append(records / (time.process_time() - begun_s))
        assert finished == 1, f"{finished} steps finished"
    print(f"{world} ranks, {records / 1e6:.2f} million records a step, {records / world:.0f} of a rank")
    for name, found in rates.items():
        print(f"{name}: {statistics.median(found) / 1e6:.2f} million records a second, {options.steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
