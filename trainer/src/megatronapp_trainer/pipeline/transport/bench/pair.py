"""Transfers between two ranks and how long they take. Imports torch only for gloo."""

import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import megatronapp_native as native

WINDOW = 4
"""Messages in flight."""
BUFFERS = 2
"""Memory that messages are sent from in turn."""
MOST_MESSAGES = 1000
BLOCK_BYTES = 64 << 20
"""Bytes of a measurement, unless that is more than MOST_MESSAGES or fewer than 2 x WINDOW messages."""
PINGS = 200
DEADLINE_S = 60.0
START, END = 0, 1
"""Progress words in which a rank publishes when it began and ended, on the node's monotonic clock."""

Stream = Callable[[int, int, bool, bool], None]
"""Moves `count` messages of a size; whether this rank sends, and whether it receives."""


class Direction(NamedTuple):
    """Which of the two ranks send."""

    name: str
    first_sends: bool
    second_sends: bool


DIRECTIONS = (Direction("forth", True, False), Direction("back", False, True), Direction("both", True, True))


@dataclasses.dataclass(frozen=True, slots=True)
class PairOptions:
    """How two ranks measure."""

    directory: str
    """In shared memory."""
    job: str
    sizes: tuple[int, ...]
    """Bytes of the messages whose bandwidth is measured."""
    latency_bytes: int
    rounds: int
    gloo: bool
    """True to measure gloo as well, over a process group that has begun."""


class PairRank:
    """One of two ranks that measure their transfers; the other one makes the same calls."""

    def __init__(self, options: PairOptions, rank: int, peer: int) -> None:
        """Connect with the other rank; takes WINDOW x the largest size of shared memory."""
        self._options = options
        self._rank = rank
        self._peer = peer
        self._is_first = rank < peer
        largest = max(options.sizes)
        self._endpoint = native.TransportEndpoint(
            directory=options.directory,
            job=f"{options.job}-{min(rank, peer)}-{max(rank, peer)}",
            attempt=1,
            rank=rank,
            slot_bytes=largest,
            slots=WINDOW,
            deadline_s=DEADLINE_S,
            threads=1,
        )
        self._endpoint.add_peer(peer, True)
        self._endpoint.connect()
        self._sources = np.ones((BUFFERS, largest), np.uint8)
        self._targets = np.zeros((BUFFERS, largest), np.uint8)
        self._sent = 0
        self._received = 0

    def close(self) -> None:
        """End the transport between the two ranks."""
        self._endpoint.close(True)

    def measure(self) -> dict[str, Any]:
        """Return medians: latency in microseconds by path, and GB/s by size, direction and path."""
        streams: dict[str, Stream] = {"memcpy": self._copy, "transport": self._transfer}
        if self._options.gloo:
            streams["gloo"] = self._transfer_gloo
        rates = {
            str(size): {
                direction.name: {name: self._rate(stream, size, direction) for name, stream in streams.items()}
                for direction in DIRECTIONS
            }
            for size in self._options.sizes
        }
        latency = {name: self._latency_us(stream) for name, stream in streams.items() if name != "memcpy"}
        return {"latency_us": latency, "bandwidth_gb_s": rates}

    def _rate(self, stream: Stream, size: int, direction: Direction) -> float:
        """Return the median of GB/s over rounds, after one that warms up."""
        sends, receives = direction.first_sends, direction.second_sends
        if not self._is_first:
            sends, receives = receives, sends
        count = max(2 * WINDOW, min(MOST_MESSAGES, BLOCK_BYTES // size))
        moved = size * count * (direction.first_sends + direction.second_sends)
        values = []
        for _ in range(self._options.rounds + 1):
            self._meet()
            begun_ns = time.monotonic_ns()
            stream(size, count, sends, receives)
            ended_ns = time.monotonic_ns()
            self._endpoint.publish(START, begun_ns)
            self._endpoint.publish(END, ended_ns)
            self._meet()
            begun_ns = min(begun_ns, self._endpoint.read(self._peer, START))
            ended_ns = max(ended_ns, self._endpoint.read(self._peer, END))
            values.append(moved / (ended_ns - begun_ns))
        return statistics.median(values[1:])

    def _latency_us(self, stream: Stream) -> float:
        """Return half of the median round trip."""
        size, trips = self._options.latency_bytes, []
        self._meet()
        for _ in range(PINGS):
            begun_ns = time.monotonic_ns()
            stream(size, 1, self._is_first, not self._is_first)
            stream(size, 1, not self._is_first, self._is_first)
            trips.append(time.monotonic_ns() - begun_ns)
        return statistics.median(trips) / 2e3

    def _meet(self) -> None:
        """Wait until the other rank is here, too."""
        self._transfer(1, 1, True, True)

    def _copy(self, size: int, count: int, sends: bool, _receives: bool) -> None:
        for number in range(count if sends else 0):
            place = number % BUFFERS
            ctypes.memmove(self._targets[place].ctypes.data, self._sources[place].ctypes.data, size)

    def _transfer(self, size: int, count: int, sends: bool, receives: bool) -> None:
        """Send and receive in turn; a message is released where it lies, unread."""
        for number in range(count):
            if sends:
                source = self._sources[number % BUFFERS]
                self._endpoint.send(self._peer, self._sent, source.ctypes.data, size, source)
                self._sent += 1
            if receives and (not sends or number >= WINDOW):
                self._receive()
        if sends and receives:
            for _ in range(min(WINDOW, count)):
                self._receive()

    def _receive(self) -> None:
        self._endpoint.receive(self._peer, self._received, DEADLINE_S).release()
        self._received += 1

    def _transfer_gloo(self, size: int, count: int, sends: bool, receives: bool) -> None:
        import torch
        import torch.distributed as dist

        pending: list[Any] = []
        for number in range(count):
            if len(pending) >= WINDOW * (sends + receives):
                for _ in range(sends + receives):
                    pending.pop(0).wait()
            place = number % BUFFERS
            if sends:
                pending.append(dist.isend(torch.from_numpy(self._sources[place][:size]), self._peer))
            if receives:
                pending.append(dist.irecv(torch.from_numpy(self._targets[place][:size]), self._peer))
        for work in pending:
            work.wait()
