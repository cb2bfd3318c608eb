"""Placement of the ranks of a simulated job, in Megatron's order: tensor fastest, then data, pipeline slowest."""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
WORLD_SLOT = 0
DATA_SLOT = 1
Members = tuple[str, tuple[int, ...]]
"""Kind and members of a communicator; a `p2p` one is directed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of a layout, and how many ranks share a worker and a node."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ranks_per_worker: int = 8
    ranks_per_node: int = 8

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def stage_size(self) -> int:
        """Ranks of one stage."""
        return self.tp * self.dp

    def rank(self, stage: int, replica: int = 0, tensor: int = 0) -> int:
        return (stage * self.dp + replica) * self.tp + tensor

    def stage_of(self, rank: int) -> int:
        return rank // self.stage_size

    def unit(self, rank: int) -> tuple[int, ...]:
        """Ranks that meet `rank` inside its passes (tensor parallelism), itself included."""
        first = rank - rank % self.tp
        return tuple(range(first, first + self.tp))

    def ranks_of(self, kind: str, number: int) -> tuple[int, ...]:
        """Ranks of a subject: `rank`, `worker`, `node`, `stage` or `job`. Raises ValueError for what is not there."""
        sizes = {"rank": 1, "worker": self.ranks_per_worker, "node": self.ranks_per_node, "stage": self.stage_size}
        sizes["job"] = self.world
        if kind not in sizes:
            raise ValueError(f"'{kind}' is no kind of subject; write one of {', '.join(sizes)}")
        ranks = tuple(range(number * sizes[kind], min((number + 1) * sizes[kind], self.world)))
        if number < 0 or not ranks:
            raise ValueError(f"{kind} {number} is not in a job of {self.world} ranks; write a smaller number")
        return ranks

    @functools.cached_property
    def node_of(self) -> Ints:
        return np.arange(self.world) // self.ranks_per_node

    @functools.cached_property
    def worker_of(self) -> Ints:
        return np.arange(self.world) // self.ranks_per_worker

    def neighbour_slots(self, stage: int) -> dict[tuple[int, int], int]:
        """Slots of a rank's directed pairs, by (stage of the source, stage of the destination)."""
        slots: dict[tuple[int, int], int] = {}
        if self.pp > 1:
            for other in ((stage + 1) % self.pp, (stage - 1) % self.pp):
                for pair in ((stage, other), (other, stage)):
                    slots.setdefault(pair, DATA_SLOT + 1 + len(slots))
        return slots

    @functools.cached_property
    def comms(self) -> dict[int, dict[int, Members]]:
        """Communicator table of each rank, by slot."""
        world: Members = ("world", tuple(range(self.world)))
        tables: dict[int, dict[int, Members]] = {}
        for stage in range(self.pp):
            slots = self.neighbour_slots(stage)
            for place in range(self.stage_size):
                first = stage * self.stage_size + place % self.tp
                data: Members = ("dp", tuple(range(first, first + self.stage_size, self.tp)))
                table = {WORLD_SLOT: world, DATA_SLOT: data}
                for (source, target), slot in slots.items():
                    table[slot] = ("p2p", (source * self.stage_size + place, target * self.stage_size + place))
                tables[stage * self.stage_size + place] = table
        return tables
