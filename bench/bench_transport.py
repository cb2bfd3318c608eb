"""Bandwidth and latency of the transport in shared memory, next to memcpy and gloo.

    python bench/bench_transport.py [--rounds 5] [--json FILE]

Two processes, fp32 tensors, one thread each for torch. Everything is from one run: in each round, each size takes turns
through memcpy, the transport and gloo. "one way" is rank 0 to rank 1, "both" is both at once, with the bytes of both
counted; memcpy copies between two tensors of a process, for "both" in both processes at once. A receiver of the
transport releases the message where it lies, unread; gloo copies it into a tensor. Bandwidths are medians
over rounds; ratios are medians of each round's ratio. Latency is half of a round trip. "Search for arrivals" is what a
rank does after each change of its activity while messages are expected and none is there.
"""

import argparse
import contextlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatronapp_trainer.pipeline.transport.tensor_transport import (
    TensorSpec,
    TensorTransport,
    TransportOptions,
    shared_memory_directory,
)

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
LATENCY_SIZES = (8, 4 << 10, 64 << 10, 1 << 20)
BLOCK_BYTES = 256 << 20
MOST_MESSAGES = 2000
PINGS = 300
EXPECTED = (1, 16, 256)
SCANS = 200
WINDOW = 4  # messages in flight, for all three

Stream = Callable[[int, int, bool, bool], None]
"""Moves `count` messages of a size; whether this rank sends, and whether it receives."""


class Buffers:
    """Tensors of one size that streams use in turn; together, those of up to 1 MiB fit in the caches of most CPUs."""

    def __init__(self, size: int) -> None:
        self.sources = [torch.full((size // 4,), float(i)) for i in range(WINDOW)]
        self.targets = [torch.zeros(size // 4) for _ in range(WINDOW)]


class TransportRank:
    """One rank of the measurement."""

    def __init__(self, rank: int, directory: str) -> None:
        self.rank = rank
        self.peer = 1 - rank
        self.buffers = {size: Buffers(size) for size in {*SIZES, *LATENCY_SIZES}}
        options = TransportOptions(
            job=f"bench-{os.getppid()}", attempt=1, rank=rank, slot_bytes=max(SIZES), slots=WINDOW, directory=directory
        )
        self.transport = TensorTransport(options, peers=[self.peer])
        self.transport.connect()
        self.sent = 0
        self.received = 0

    def memcpy(self, size: int, count: int, sends: bool, receives: bool) -> None:
        buffers = self.buffers[size]
        for i in range(count if sends else 0):
            buffers.targets[i % WINDOW].copy_(buffers.sources[i % WINDOW])

    def native(self, size: int, count: int, sends: bool, receives: bool) -> None:
        buffers, spec = self.buffers[size], TensorSpec((size // 4,), torch.float32)
        for i in range(count if sends else 0):
            self.transport.send(self.peer, self.sent + i, buffers.sources[i % WINDOW])
        for i in range(count if receives else 0):
            self.transport.receive(self.peer, self.received + i, spec).release()
        self.sent += count if sends else 0
        self.received += count if receives else 0

    def gloo(self, size: int, count: int, sends: bool, receives: bool) -> None:
        buffers = self.buffers[size]
        pending: list[Any] = []
        for i in range(count):
            if len(pending) >= WINDOW * (sends + receives):
                for _ in range(sends + receives):
                    pending.pop(0).wait()
            if sends:
                pending.append(dist.isend(buffers.sources[i % WINDOW], self.peer))
            if receives:
                pending.append(dist.irecv(buffers.targets[i % WINDOW], self.peer))
        for work in pending:
            work.wait()

    def seconds(self, stream: Stream, size: int, count: int, both: bool) -> float:
        """Seconds until the slower of both ranks has finished."""
        dist.barrier()
        start = time.perf_counter()
        stream(size, count, both or self.rank == 0, both or self.rank == 1)
        elapsed = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return float(elapsed)

    def half_round_trip(self, stream: Stream, size: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(PINGS):
            stream(size, 1, self.rank == 0, self.rank == 1)
            stream(size, 1, self.rank == 1, self.rank == 0)
        return (time.perf_counter() - start) / PINGS / 2

    def scan_seconds(self, expected: int, together: bool) -> float:
        """Seconds to find that none of `expected` messages is there: key by key, or all together."""
        spec = TensorSpec((1,), torch.float32)
        keys = [1 << 40 | number for number in range(expected)]
        start = time.perf_counter()
        for _ in range(SCANS):
            if together:
                self.transport.take_arrived([self.peer], spec)
            else:
                for key in keys:
                    self.transport.poll(self.peer, key, spec)
        return (time.perf_counter() - start) / SCANS

    def run(self, rounds: int) -> dict[str, Any]:
        streams: dict[str, Stream] = {"memcpy": self.memcpy, "transport": self.native, "gloo": self.gloo}
        bandwidth: dict[str, dict[str, list[float]]] = {}
        latency: dict[str, dict[str, list[float]]] = {}
        scans: dict[str, dict[str, list[float]]] = {}
        for round_number in range(rounds + 1):  # the first one warms up
            for size in SIZES:
                count = max(WINDOW, min(MOST_MESSAGES, BLOCK_BYTES // size))
                for both in (False, True):
                    for name, stream in streams.items():
                        rate = size * count * (1 + both) / self.seconds(stream, size, count, both) / 1e9
                        key = f"{size} {'both' if both else 'one way'}"
                        bandwidth.setdefault(key, {}).setdefault(name, []).append(rate)
            for size in LATENCY_SIZES:
                for name in ("transport", "gloo"):
                    latency.setdefault(str(size), {}).setdefault(name, []).append(
                        self.half_round_trip(streams[name], size) * 1e6
                    )
            for expected in EXPECTED:
                for name in ("by key", "together"):
                    scans.setdefault(str(expected), {}).setdefault(name, []).append(
                        self.scan_seconds(expected, name == "together") * 1e6
                    )
            if self.rank == 0:
                print(f"round {round_number} of {rounds}", file=sys.stderr, flush=True)
        return {"bandwidth_gb_s": trimmed(bandwidth), "latency_us": trimmed(latency), "scan_us": trimmed(scans)}


def trimmed(table: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    """Drop the first round, which warms up."""
    return {key: {name: values[1:] for name, values in row.items()} for key, row in table.items()}


def ratio(row: dict[str, list[float]], name: str, anchor: str) -> float:
    return statistics.median(a / b for a, b in zip(row[name], row[anchor], strict=True))


def named(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def summary(result: dict[str, Any]) -> Iterator[str]:
    """Lines of three tables."""
    yield "| size, direction | memcpy | transport | gloo | transport / memcpy | transport / gloo |"
    yield "|---|---|---|---|---|---|"
    for key, row in result["bandwidth_gb_s"].items():
        size, _, direction = key.partition(" ")
        rates = " | ".join(f"{statistics.median(row[name]):.2f}" for name in ("memcpy", "transport", "gloo"))
        ratios = f"{ratio(row, 'transport', 'memcpy'):.2f} | {ratio(row, 'transport', 'gloo'):.1f}"
        yield f"| {named(int(size))}, {direction} | {rates} | {ratios} |"
    yield ""
    yield "| bytes | transport, us | gloo, us | transport / gloo |"
    yield "|---|---|---|---|"
    for size, row in result["latency_us"].items():
        values = " | ".join(f"{statistics.median(row[name]):.1f}" for name in ("transport", "gloo"))
        yield f"| {size} | {values} | {ratio(row, 'transport', 'gloo'):.2f} |"
    yield ""
    yield "| search for arrivals: expected | key by key, us | together, us | together / key by key |"
    yield "|---|---|---|---|"
    for expected, row in result["scan_us"].items():
        values = " | ".join(f"{statistics.median(row[name]):.1f}" for name in ("by key", "together"))
        yield f"| {expected} | {values} | {ratio(row, 'together', 'by key'):.3f} |"


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{options.port}"
    dist.init_process_group("gloo", init_method=address, rank=options.rank, world_size=2)
    bench = TransportRank(options.rank, options.directory)
    result = bench.run(options.rounds)
    dist.barrier()
    bench.transport.close()
    dist.destroy_process_group()
    if options.rank == 0:
        print(json.dumps(result))


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the transport with memcpy and gloo.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="write all values here")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Start both ranks and print three tables."""
    options = parse_arguments()
    if options.rank is not None:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory(dir=shared_memory_directory()) as directory:
        command = [sys.executable, __file__, "--rounds", str(options.rounds), "--port", str(free_port())]
        command += ["--directory", directory]
        second = subprocess.Popen([*command, "--rank", "1"])
        first = subprocess.run([*command, "--rank", "0"], stdout=subprocess.PIPE, text=True, check=True)
        if second.wait() != 0:
            raise SystemExit(f"rank 1 ended with exit code {second.returncode}")
    result = json.loads(first.stdout.splitlines()[-1])
    if options.json:
        options.json.write_text(json.dumps(result), encoding="utf-8")
    print("\n".join(summary(result)))


if __name__ == "__main__":
    main()
