"""Policies of MegaDPP's schedules."""

from megatronapp_trainer.config.dpp import DppConfig
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pipeline.planning.orders import interleaved, peak_in_flight, zero_bubble_h1
from megatronapp_trainer.pipeline.planning.policies import Greedy, PlanGuided, Policy, Static
from megatronapp_trainer.pipeline.planning.tasks import Placement

SPARE_CHUNKS = 2
"""Activations of chunks that `auto` may keep beyond the static order's, by default. Simulated and measured in
`docs/megadpp.md`: with two more, nearly all waits for late inputs are filled.
"""


class DppPlan:
    """Plan that a configuration gives the ranks of a pipeline; the same on all of them."""

    def __init__(self, config: DppConfig, placement: Placement) -> None:
        self.placement = placement
        self.split = config.dpp_schedule in {"auto", "zero-bubble"}
        """True if weight gradients are tasks of their own."""
        self._schedule = config.dpp_schedule
        self._cap = config.dpp_memory_cap

    def policy(self, rank: int, num_microbatches: int) -> Policy:
        """Return the policy of a pipeline rank for one step. Raises UsageError if its order needs more than the cap."""
        if self._schedule in {"dfc", "bfc"}:
            return Greedy(depth_first=self._schedule == "dfc", admitted=self._cap or self.placement.ranks)
        if self._schedule == "zero-bubble":
            return Static(zero_bubble_h1(self.placement, num_microbatches, rank))
        order = interleaved(self.placement, num_microbatches, rank)
        if self._schedule == "static":
            return Static(order)
        return PlanGuided(order, cap=self._chunks_cap(rank, num_microbatches))

    def peak_chunks(self, num_microbatches: int) -> int:
        """Return the most chunks whose activations a rank keeps at a time in a step."""
        ranks = range(self.placement.ranks)
        if self._schedule in {"dfc", "bfc"}:
            return (self._cap or self.placement.ranks) * self.placement.chunks
        if self._schedule == "zero-bubble":
            return self.placement.ranks
        if self._schedule == "static":
            return max(self._planned(rank, num_microbatches) for rank in ranks)
        return max(self._chunks_cap(rank, num_microbatches) for rank in ranks)

    def _planned(self, rank: int, num_microbatches: int) -> int:
        order = interleaved(self.placement, num_microbatches, rank)
        return peak_in_flight(order, (1,) * self.placement.chunks)

    def _chunks_cap(self, rank: int, num_microbatches: int) -> int:
        """Return the cap of `auto` in chunks."""
        planned = self._planned(rank, num_microbatches)
        if self._cap is None:
            return planned + SPARE_CHUNKS
        cap = self._cap * self.placement.chunks
        if cap < planned:
            least = -(-planned // self.placement.chunks)
            raise UsageError(
                f"--dpp-memory-cap {self._cap}: stage {rank} keeps the activations of {least} microbatches at a time "
                f"even in the static order; give {least} or more"
            )
        return cap
