"""Transfers between all pairs of GPUs of a host at once, next to NCCL, in alternating blocks of one run.

    . bench/gpu_setup.sh; python3 bench/gpu_transport_pairs.py --out pairs.json      # all GPUs; some 40 s on four
    python bench/gpu_transport_pairs.py --cpu --ranks 4 --out pairs.json             # whether it runs, next to gloo

"to all": each rank sends as many messages to each other rank, and receives as many; "ring": only to the next one, both
ways. Figures are the bytes that a rank sends in a second, from a barrier to the end of the slowest rank: medians over
rounds, in which sizes, patterns and transports take turns. Over the native transport up to four messages to a peer are
on their way, and a rank's host waits for each that it receives; over NCCL the host waits for none.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from bench_device import BenchDevice
from gpu_ranks import give_up_after, run_ranks

from megatronapp_trainer.pipeline.transport.tensor_transport import TensorSpec, TensorTransport, TransportOptions

MIB = 1 << 20
SLOTS = 4
"""Messages from one rank to another that are on their way or in use."""


class PairsBench:
    """One rank: its messages to others over the native transport and over torch.distributed."""

    def __init__(self, device: torch.device, sizes: Sequence[int], directory: str) -> None:
        """Connect to all other ranks of the default process group."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._device = BenchDevice(device)
        others = [rank for rank in range(self.world) if rank != self.rank]
        self._transport = TensorTransport(
            TransportOptions(
                job="pairs",
                attempt=1,
                rank=self.rank,
                slot_bytes=max(sizes),
                slots=SLOTS,
                directory=directory,
                device=device.index if device.type == "cuda" else None,
            ),
            peers=others,
        )
        self._transport.connect()
        self.path = self._transport.paths[others[0]]
        self._source = torch.ones(max(sizes) // 4, device=device)
        self._targets = {peer: torch.zeros_like(self._source) for peer in others}
        self._numbers: dict[int, int] = defaultdict(int)

    def seconds(self, way: str, peers: Sequence[int], size: int, count: int) -> float:
        """Return how long the slowest rank takes for `count` messages to and from each of its peers."""
        self._device.synchronize()
        dist.barrier()
        begun = time.perf_counter()
        if way == "transport":
            self._exchange(peers, size, count)
        else:
            self._exchange_by_group(peers, size, count)
        self._device.synchronize()
        elapsed = torch.tensor([time.perf_counter() - begun], device=self._source.device)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return float(elapsed)

    def _exchange(self, peers: Sequence[int], size: int, count: int) -> None:
        spec, message = TensorSpec((size // 4,), torch.float32), self._source[: size // 4]
        ahead = min(SLOTS, count)
        for offset in range(ahead):
            for peer in peers:
                self._transport.send(peer, self._numbers[peer] + offset, message)
        for number in range(count):
            for peer in peers:
                self._transport.receive(peer, self._numbers[peer], spec, 30.0).release()
                if number + ahead < count:
                    self._transport.send(peer, self._numbers[peer] + ahead, message)
                self._numbers[peer] += 1
        while self._transport.sending():
            time.sleep(0)

    def _exchange_by_group(self, peers: Sequence[int], size: int, count: int) -> None:
        for _ in range(count):
            posts = [dist.P2POp(dist.isend, self._source[: size // 4], peer) for peer in peers]
            posts += [dist.P2POp(dist.irecv, self._targets[peer][: size // 4], peer) for peer in peers]
            for work in dist.batch_isend_irecv(posts):
                work.wait()

    def close(self) -> None:
        """Close the connections to all other ranks."""
        self._transport.close()


def work(options: argparse.Namespace) -> None:
    """Measure on one rank; the first one prints and writes the medians."""
    give_up_after(200)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if options.cpu else torch.device("cuda", rank)
    if not options.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.cpu else "nccl")
    sizes = [size * MIB for size in options.sizes]
    bench = PairsBench(device, sizes, options.directory)
    patterns = {"to all": [other for other in range(world) if other != rank]}
    if world > 2:
        patterns["ring"] = sorted({(rank + 1) % world, (rank - 1) % world})
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):  # the first one warms up
        for size in sizes:
            count = max(2, options.bytes * MIB // size)
            for pattern, peers in patterns.items():
                for way in ("transport", dist.get_backend()):
                    seconds = bench.seconds(way, peers, size, count)
                    if number:
                        name = f"{pattern}, {size // MIB} MiB, {way} GB/s"
                        found[name].append(1e-9 * size * count * len(peers) / seconds)
    bench.close()
    if rank == 0:
        kind = "CPU" if options.cpu else torch.cuda.get_device_name(0)
        rows: dict[str, object] = {"device": kind, "ranks": world, "path": bench.path}
        rows |= {name: round(statistics.median(values), 2) for name, values in found.items()}
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        for name, value in rows.items():
            print(f"{name:32} {value}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="default: one for each GPU")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 64])
    parser.add_argument("--bytes", type=int, default=512, metavar="MIB", help="to each peer in a block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_transport_pairs.json"))
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        given = [f"--sizes={','.join(map(str, options.sizes))}", f"--bytes={options.bytes}", f"--out={options.out}"]
        given += [f"--rounds={options.rounds}", f"--directory={directory}", *(["--cpu"] if options.cpu else [])]
        run_ranks([__file__, *given], options.ranks or torch.cuda.device_count())


if __name__ == "__main__":
    main()
