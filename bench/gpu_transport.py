"""Transfers between devices: bandwidth, latency, and what they cost computation.

    . bench/gpu_setup.sh; python3 bench/gpu_transport.py [--rounds 3] [--json FILE]

Two processes. With two devices each has one, and everything is next to NCCL in the same run; with one device both use
it, and everything is next to a copy on a stream of one process: the device then takes turns between the processes, some
2 ms each, so that only one way with many messages says something about the transport. "one way" is rank 0 to rank 1,
"both" is both at once, with the bytes of both counted. Times are of the host, from a barrier to the end of the slower
rank's stream; medians over rounds, in which sizes and ways take turns. Latency is half of a round trip in which each
rank's stream waits for the message on the device. "8 at once" is one way with 64 messages of 8 MiB, of which as many
are in flight as there are slots (16).
The slowdown is of matrix products on rank 0 while both ranks send 64 MiB messages all the time.

Medians are printed after each round. Estimated time on two devices: 30 s for the start, 20 s a round. One pair of
devices is measured: several pairs at once are not.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatronapp_trainer.pipeline.transport.tensor_transport import (
    ReceivedTensor,
    TensorSpec,
    TensorTransport,
    TransportOptions,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MIB = 1 << 20
SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
LATENCY_SIZES = (4 << 10, 64 << 10, MIB)
SLOTS = 16
PINGS = 50
BLOCK_BYTES = 256 * MIB
LIMIT_S = 200
PRODUCTS = 60

Way = Callable[[int, int, bool, bool], None]
"""Enqueues `count` messages of a size; whether this rank sends, and whether it receives."""


class Rank:
    """One process of the measurement."""

    def __init__(self, rank: int, directory: str, devices: int) -> None:
        self.rank = rank
        self.peer = 1 - rank
        self.device = rank % devices
        torch.cuda.set_device(self.device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(pathlib.Path(directory) / "store"), 2
        )
        backend = "cpu:gloo,cuda:nccl" if devices > 1 else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=2)
        self.source = torch.ones(64 * MIB // 4, device="cuda")
        self.target = torch.zeros(64 * MIB // 4, device="cuda")
        self.ways: dict[str, Way] = {"transport": self.native}
        self.ways |= {"nccl": self.nccl} if devices > 1 else {"copy": self.copy}
        options = TransportOptions(
            job="bench", attempt=1, rank=rank, slot_bytes=64 * MIB, slots=SLOTS, directory=directory, device=self.device
        )
        self.transport = TensorTransport(options, peers=[self.peer])
        self.transport.connect()
        self.sent = 0
        self.received = 0

    def native(self, size: int, count: int, sends: bool, receives: bool) -> None:
        spec, message = TensorSpec((size // 4,), torch.float32), self.source[: size // 4]
        for _ in range(count):
            if sends:
                self.transport.send(self.peer, self.sent, message)
                self.sent += 1
            if receives:
                self.await_posted(spec).release()
                self.received += 1

    def await_posted(self, spec: TensorSpec) -> ReceivedTensor:
        """Return the next message as soon as it is announced; the stream waits for it."""
        while True:
            seen = self.transport.activity()
            message = self.transport.poll(self.peer, self.received, spec, posted=True)
            if message is not None:
                return message
            self.transport.wait_activity(seen, 10.0)

    def nccl(self, size: int, count: int, sends: bool, receives: bool) -> None:
        for _ in range(count):
            posts = [dist.P2POp(dist.isend, self.source[: size // 4], self.peer)] if sends else []
            posts += [dist.P2POp(dist.irecv, self.target[: size // 4], self.peer)] if receives else []
            for work in dist.batch_isend_irecv(posts):
                work.wait()

    def copy(self, size: int, count: int, sends: bool, receives: bool) -> None:
        for _ in range(count if sends else 0):
            self.target[: size // 4].copy_(self.source[: size // 4])

    def seconds(self, way: Way, size: int, count: int, both: bool) -> float:
        """Return the seconds until the slower of both ranks has finished."""
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        way(size, count, both or self.rank == 0, both or self.rank == 1)
        while self.transport.sending():
            time.sleep(0)
        torch.cuda.synchronize()
        elapsed = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return float(elapsed)

    def half_round_trip(self, way: Way, size: int) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(PINGS):
            way(size, 1, self.rank == 0, self.rank == 1)
            way(size, 1, self.rank == 1, self.rank == 0)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / PINGS / 2

    def products(self, messages: int) -> float:
        """Return the seconds of matrix products on rank 0, while both ranks send messages of 64 MiB."""
        matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        compute = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.stream(compute):
            start.record()
            for _ in range(PRODUCTS if self.rank == 0 else 1):
                matrix @ matrix
            end.record()
        self.native(64 * MIB, messages, True, True)
        torch.cuda.synchronize()
        return 1e-3 * float(start.elapsed_time(end))

    def messages_during(self, seconds: float) -> int:
        """Return how many messages of 64 MiB go both ways in some more than that time of rank 0."""
        each = self.seconds(self.native, 64 * MIB, 8, True) / 8
        count = torch.tensor(1 + int(1.2 * seconds / each))
        dist.broadcast(count, 0)
        return int(count)

    def run(self, rounds: int) -> dict[str, Any]:
        samples: dict[str, list[float]] = {}

        def add(name: str, value: float) -> None:
            samples.setdefault(name, []).append(value)

        for number in range(rounds + 1):  # the first one warms up
            keep = add if number else lambda name, value: None
            if self.rank == 0:
                print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
            for size in SIZES:
                count = max(4, BLOCK_BYTES // size)
                for name, way in self.ways.items():
                    keep(
                        f"one way {size >> 20} MiB {name} GB/s",
                        1e-9 * size * count / self.seconds(way, size, count, False),
                    )
                    sides = 2 if name != "copy" else 1
                    both = self.seconds(way, size, count, name != "copy")
                    keep(f"both {size >> 20} MiB {name} GB/s", 1e-9 * sides * size * count / both)
            for size in LATENCY_SIZES:
                for name, way in self.ways.items():
                    keep(f"latency {size >> 10} KiB {name} us", 1e6 * self.half_round_trip(way, size))
            keep("8 at once GB/s", 64e-9 * MIB * 8 / self.seconds(self.native, 8 * MIB, 64, False))
            alone = self.products(0)
            with_transfers = self.products(self.messages_during(alone))
            keep("products alone ms", 1e3 * alone)
            keep("products with transfers ms", 1e3 * with_transfers)
            if self.rank == 0 and number:  # what is known if the run is cut off
                print(json.dumps({"rounds": number, **medians(samples)}), flush=True)
        return medians(samples)


def medians(samples: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: round(statistics.median(values), 3) for name, values in samples.items()}


def _rank(rank: int, directory: str, devices: int, rounds: int, pipe: "Connection[Any, Any]") -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # a rank that hangs says where
    process = Rank(rank, directory, devices)
    result = process.run(rounds)
    result |= {"rank": rank, "path": process.transport.statistics(1 - rank)["path"]}
    process.transport.close()
    pipe.send(result)
    dist.destroy_process_group()


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    devices = min(2, torch.cuda.device_count())
    if devices == 0:
        print("needs an NVIDIA device", file=sys.stderr)
        return 1
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        ours, theirs = context.Pipe()
        processes = [
            context.Process(target=_rank, args=(rank, directory, devices, options.rounds, theirs)) for rank in range(2)
        ]
        for process in processes:
            process.start()
        results = []
        for process in processes:
            process.join(500)
            if process.exitcode != 0:
                print(f"a rank ended with {process.exitcode}", file=sys.stderr)
                for other in processes:
                    other.kill()
                return 1
        while ours.poll():
            results.append(ours.recv())
    (first,) = (result for result in results if result["rank"] == 0)  # whose products are slowed
    table = {"devices": devices, "device": torch.cuda.get_device_name(0), **first}
    for name, value in table.items():
        print(f"{name:40} {value}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
