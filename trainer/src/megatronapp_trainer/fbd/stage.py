"""Place of a rank in the pipeline of its role."""

import dataclasses

from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.pipeline.planning.tasks import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Place of a rank in the pipeline of its role; ranks are those of the launcher."""

    placement: Placement
    rank: int
    """Pipeline rank."""
    previous: int
    """Rank of the stage before, in the loop over the pipeline."""
    following: int
    """Rank of the stage after, in the loop."""

    def is_first(self, chunk: int) -> bool:
        """Return True if the chunk has the embedding."""
        return self.placement.stage(self.rank, chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """Return True if the chunk computes the loss."""
        return self.placement.stage(self.rank, chunk) == self.placement.stages - 1


def stage_of(layout: Layout) -> Stage:
    """Return the place of this rank, which has a role, with the ranks of its neighbours as the launcher counts them."""
    world, size = layout.fbd, layout.pipeline_size
    assert world is not None
    stride = layout.world_size // size
    place = layout.pipeline_rank
    previous, following = (
        world.rank_of(layout.role, layout.rank + (neighbour % size - place) * stride)
        for neighbour in (place - 1, place + 1)
    )
    return Stage(placement=Placement(size, layout.virtual_size), rank=place, previous=previous, following=following)
