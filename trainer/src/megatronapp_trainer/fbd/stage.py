"""Place of a rank in the pipeline of its role."""

import dataclasses

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
