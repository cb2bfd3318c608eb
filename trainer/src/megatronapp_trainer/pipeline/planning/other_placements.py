"""Steps of the same model with another number of chunks on each rank, simulated with the times that were measured."""

import dataclasses
import statistics
from collections.abc import Sequence

from megatronapp_trainer.pipeline.planning.choice import MeasuredTimes
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape, TaskKind

MOST_CHUNKS = 4
"""More chunks on a rank send more often than they shorten waits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedPlacement:
    """A placement of the model's stages, and what the simulation expects of it."""

    placement: Placement
    seconds: float
    """Expected duration of the tasks of a step."""

    @property
    def flags(self) -> str:
        """Return the flags that ask for it, as a text."""
        if self.placement.chunks == 1:
            return "one chunk on each rank"
        chunks = f"--num-virtual-stages-per-pipeline-rank {self.placement.chunks}"
        return f"{chunks} --dpp-placement vee" if self.placement.shape is Shape.VEE else chunks


def other_placements(
    placement: Placement, num_microbatches: int, layers_of_rank: int, *, has_vee: bool = True
) -> list[Placement]:
    """Return the other placements of the same layers that have an order for this number of microbatches.

    Those of a loop with several chunks need a multiple of the ranks as the number of microbatches. `has_vee`: the model
    can be placed in a vee.
    """
    found = [Placement(placement.ranks)]
    for chunks in range(2, MOST_CHUNKS + 1):
        if layers_of_rank % chunks:
            continue
        if num_microbatches % placement.ranks == 0:
            found.append(Placement(placement.ranks, chunks))
        if chunks == 2 and has_vee:
            found.append(Placement(placement.ranks, chunks, Shape.VEE))
    return [other for other in found if other != placement]


def times_in(times: MeasuredTimes, placement: Placement, other: Placement) -> MeasuredTimes:
    """Return the times that tasks would have in another placement of the same model.

    A rank's work is divided equally among its chunks, but for that of the model's end (output layer and loss), which
    the last stage has in any placement: what that takes more than the rank's other chunks or, with one chunk, than the
    other ranks, is the end's. A last rank that is slow with one chunk is thus taken for one with a long end.
    """
    rank_of_end, chunk_of_end = placement.holder(placement.stages - 1)
    other_rank_of_end, other_chunk_of_end = other.holder(other.stages - 1)
    task_seconds: dict[tuple[int, TaskKind, int], Sequence[float]] = {}
    for kind in TaskKind:
        usual = {
            (rank, chunk): statistics.median(times.task_seconds[rank, kind, chunk])
            for rank in range(placement.ranks)
            for chunk in range(placement.chunks)
        }
        end = usual.pop((rank_of_end, chunk_of_end))
        peers = [seconds for (rank, _), seconds in usual.items() if rank == rank_of_end] or list(usual.values())
        body = min(end, statistics.median(peers))
        for rank in range(placement.ranks):
            own = [usual.get((rank, chunk), body) for chunk in range(placement.chunks)]
            for chunk in range(other.chunks):
                expected = sum(own) / other.chunks
                if (rank, chunk) == (other_rank_of_end, other_chunk_of_end):
                    expected += end - body
                measured = times.task_seconds[rank, kind, chunk % placement.chunks]
                median = statistics.median(measured)
                scale = expected / median if median else 0.0
                task_seconds[rank, kind, chunk] = [scale * seconds for seconds in measured]
    return MeasuredTimes(task_seconds=task_seconds, transfer_seconds=times.transfer_seconds)
