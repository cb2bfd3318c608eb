"""Files that MegatronApp's tracer writes, of a simulated job of two stages that send to each other and wait."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

MS = 1_000_000
Mark = dict[str, Any]
Times = dict[int, list[tuple[str, int, int]]]
"""Scopes of each stage, with start and end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MegatronAppJob:
    """Replicas of a pipeline of two stages in the order of 1F1B."""

    replicas: int = 2
    iterations: int = 3
    microbatches: int = 3
    slowness: Callable[[int, int, int], float] = lambda _replica, _stage, _iteration: 1.0
    """How many times longer passes of a replica's stage last in an iteration."""

    def rank(self, replica: int, stage: int) -> int:
        """Return the rank in the world, in the order of Megatron."""
        return stage * self.replicas + replica

    def write(self, folder: pathlib.Path) -> None:
        """Write a file of each rank."""
        for name, marks in self.files().items():
            (folder / name).write_text(json.dumps(marks), encoding="utf-8")

    def files(self) -> dict[str, list[Mark]]:
        """Return the marks of each rank by the name of its file."""
        draw = np.random.default_rng(3)
        marks: dict[tuple[int, int], list[Mark]] = {(d, p): [] for d in range(self.replicas) for p in (0, 1)}
        for iteration in range(self.iterations):
            scopes = self._iteration(iteration, draw)
            for place, (found, end_ns) in scopes.items():
                rank = self.rank(*place)
                same = {"dp_rk": place[0], "pp_rk": place[1], "tp_rk": 0, "dev": rank % 2, "g_rk": rank}
                begun = {"name": "iteration", "ph": "B", "rel_ts": 0, "pad_before": 50 * MS if iteration else None}
                marks[place].append(begun | same)
                marks[place] += [mark | same for mark in self._marks(found)]
                ended = {"name": "iteration", "ph": "E", "rel_ts": end_ns, "duration_wall": end_ns + MS}
                marks[place].append(ended | same)
        return {f"benchmark-data-{d}-pipeline-{p}-tensor-0.json": found for (d, p), found in marks.items()}

    def _iteration(
        self, iteration: int, draw: np.random.Generator
    ) -> dict[tuple[int, int], tuple[list[tuple[str, int, int]], int]]:
        replicas = [self._passes(replica, iteration, draw) for replica in range(self.replicas)]
        found = {}
        for stage in (0, 1):
            meets = max(times[stage][-1][2] for times in replicas) + 2 * MS
            for replica, times in enumerate(replicas):
                ready, end = times[stage][-1][2], meets + 3 * MS
                found[replica, stage] = [*times[stage], ("allreduce", ready, meets), ("optimizer", meets, end)], end
        return found

    def _passes(self, replica: int, iteration: int, draw: np.random.Generator) -> Times:
        """Run both stages; a transfer begins when both have reached it, and both wait for its end."""
        last = self.microbatches - 1
        now = [0, 0]
        times: Times = {0: [], 1: []}

        def run(stage: int, name: str) -> None:
            usual_ms = 10 if name.startswith("forward") else 20
            length = usual_ms * MS * self.slowness(replica, stage, iteration) * draw.normal(1, 0.005)
            times[stage].append((name, now[stage], now[stage] + int(length)))
            now[stage] = times[stage][-1][2]

        def transfer(first: str, second: str) -> None:
            end = max(now) + MS // 2
            for stage, name in enumerate((first, second)):
                times[stage].append((name, now[stage], end))
            now[:] = end, end

        run(0, "forward-warmup" if last else "forward")
        transfer("send-warmup", "recv-extra")
        for _ in range(last):
            run(0, "forward")
            run(1, "forward")
            run(1, "backward")
            transfer("exchange-next", "exchange-prev")
            run(0, "backward")
        run(1, "forward")
        run(1, "backward")
        transfer("recv-cooldown", "send-extra")
        run(0, "backward-cooldown")
        return times

    @staticmethod
    def _marks(scopes: list[tuple[str, int, int]]) -> Iterator[Mark]:
        """Yield begin and end of each scope; within a pass also those of a layer, and in forward passes of the loss."""
        for name, start, end in scopes:
            yield {"name": name, "ph": "B", "rel_ts": start}
            if name in {"forward", "backward"}:
                yield {"name": "transformer_layer", "ph": "B", "rel_ts": start + 1000}
                yield {"name": "transformer_layer", "ph": "E", "rel_ts": end - MS}
            yield {"name": name, "ph": "E", "rel_ts": end} | ({"data": 4096} if "-" in name else {})
