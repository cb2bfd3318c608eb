"""Policies of MegaDPP's schedules."""

from megatronapp_trainer.config.dpp import DppConfig
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pipeline.planning.choice import Candidate
from megatronapp_trainer.pipeline.planning.orders import interleaved, peak_in_flight, zero_bubble_h1
from megatronapp_trainer.pipeline.planning.policies import Greedy, Policy, Static
from megatronapp_trainer.pipeline.planning.tasks import Placement

SPARE_CHUNKS = 2
"""Activations of chunks that `auto` may keep beyond the static order's, by default. In simulations of 4 stages with 3
chunks, two more make a step of 8 or 16 microbatches 3 to 6 % shorter.
"""


class DppPlan:
    """Plan that a configuration gives the ranks of a pipeline; the same on all of them."""

    def __init__(self, config: DppConfig, placement: Placement) -> None:
        self.placement = placement
        self.split = config.dpp_schedule in {"auto", "zero-bubble"}
        """True if weight gradients are tasks of their own."""
        self.is_tuned = config.dpp_schedule == "auto"
        """True if the first steps decide on the plan."""
        self.candidates: dict[int, Candidate] = {}
        """Plan of `auto` by the number of microbatches, as the tuner has chosen it."""
        self._schedule = config.dpp_schedule
        self._cap = config.dpp_memory_cap

    def policy(self, rank: int, num_microbatches: int) -> Policy:
        """Return the policy of a pipeline rank for one step. Raises UsageError if its order needs more than the cap."""
        if self._schedule in {"dfc", "bfc"}:
            return Greedy(depth_first=self._schedule == "dfc", admitted=self._admitted(num_microbatches))
        if self._schedule == "zero-bubble":
            return Static(zero_bubble_h1(self.placement, num_microbatches, rank))
        if self._schedule == "static":
            return Static(interleaved(self.placement, num_microbatches, rank))
        candidate = self.candidates.get(num_microbatches)
        if candidate is None:
            candidate = Candidate(weight_delay=None, spare_chunks=self.most_spare(num_microbatches))
        return candidate.policy(self.placement, num_microbatches, rank)

    def peak_chunks(self, num_microbatches: int) -> int:
        """Return the most chunks whose activations a rank keeps at a time in a step."""
        if self._schedule in {"dfc", "bfc"}:
            return self._admitted(num_microbatches) * self.placement.chunks
        if self._schedule == "zero-bubble":
            return min(self.placement.ranks, num_microbatches)
        planned = self._planned(num_microbatches)
        return planned if self._schedule == "static" else planned + self.most_spare(num_microbatches)

    def most_spare(self, num_microbatches: int) -> int:
        """Return the chunks of memory that `auto` may use beyond the static order's on every rank.

        Raises:
            UsageError: the static order alone needs more than the cap.
        """
        planned, chunks = self._planned(num_microbatches), self.placement.chunks
        most = num_microbatches * chunks - planned
        if self._cap is None:
            return min(SPARE_CHUNKS, most)
        if self._cap * chunks < planned:
            least = -(-planned // chunks)
            raise UsageError(
                f"--dpp-memory-cap {self._cap}: the first stage keeps the activations of {least} microbatches at a "
                f"time even in the static order; give {least} or more"
            )
        return min(self._cap * chunks - planned, most)

    def _admitted(self, num_microbatches: int) -> int:
        return min(self._cap or self.placement.ranks, num_microbatches)

    def _planned(self, num_microbatches: int) -> int:
        """Return the chunks that the first rank, which keeps the most, needs in the static order."""
        return peak_in_flight(interleaved(self.placement, num_microbatches, 0), (1,) * self.placement.chunks)
