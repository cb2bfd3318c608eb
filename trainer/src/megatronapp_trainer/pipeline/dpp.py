"""Policies of MegaDPP's schedules."""

import operator
from collections.abc import Sequence

from megatronapp_trainer.config.dpp import DppConfig
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pipeline.graphs.slots import SlotLimits, slots_of_order
from megatronapp_trainer.pipeline.planning.choice import Candidate, HostReaction
from megatronapp_trainer.pipeline.planning.memory import ChunkMemory, MemoryLimit
from megatronapp_trainer.pipeline.planning.orders import (
    Order,
    interleaved,
    needed_chunks,
    peak_activations,
    static_order,
    with_weights,
    zero_bubble,
)
from megatronapp_trainer.pipeline.planning.policies import Greedy, Policy, Static
from megatronapp_trainer.pipeline.planning.report import PlanReport
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape, Task
from megatronapp_trainer.utils.byte_sizes import bytes_text

SPARE_DIVISOR = 4
"""By default `auto` may keep activations of a quarter more chunks than the static order, at least of one."""
MOST_SPARE_CHUNKS = 8
"""The chunks more with a cap in bytes, as far as that allows them: inboxes have slots for as many."""
REACTION = HostReaction(seconds=150e-6, lead_seconds=250e-6)
"""Assumed reaction of a device's host: it polls every 75 us, and launches the first kernels of a task in as long."""

ORDER_NAMES = {
    "static": "order of megatron-core",
    "dfc": "any ready pass, deepest chunk first",
    "bfc": "any ready pass, shallowest chunk first",
}
"""Plans of the other schedules, in words."""


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
        self.memory: tuple[MemoryLimit, ...] = ()
        """Limits in bytes by pipeline rank; empty without such a cap, and until a step has measured what tasks keep."""
        self._config = config
        self._schedule = config.dpp_schedule
        self._cap = config.memory_cap_microbatches
        self._cap_bytes = config.memory_cap_bytes

    def moved_to(self, placement: Placement) -> "DppPlan":
        """Return the plan that the configuration gives a model whose stages are placed like this."""
        return DppPlan(self._config, placement)

    @property
    def has_byte_cap(self) -> bool:
        """Return whether the cap is in bytes, of which is known only what the chunks of this placement keep."""
        return self._cap_bytes is not None

    @property
    def measures_memory(self) -> bool:
        """Return whether a step has to measure what tasks keep: there is a cap in bytes, and it has not been done."""
        return self._cap_bytes is not None and not self.memory

    def limit_memory(self, measured: Sequence[tuple[ChunkMemory, ...]], num_microbatches: int) -> str:
        """Let the policies hold to the cap in bytes; returns a line about it for the log.

        Args:
            measured: by pipeline rank, what each chunk keeps for a microbatch; the same on all ranks.
            num_microbatches: most microbatches of a step.

        Raises:
            UsageError: the static order, or with `dfc` and `bfc` one microbatch, needs more than the cap.
        """
        assert self._cap_bytes is not None
        memory = tuple(MemoryLimit(self._cap_bytes, chunks) for chunks in measured)
        needs = [limit.peak(self._least_order(num_microbatches, rank)) for rank, limit in enumerate(memory)]
        rank, need = max(enumerate(needs), key=lambda pair: pair[1])
        order = "one microbatch at a time" if self._schedule in {"dfc", "bfc"} else "the static order"
        if need > self._cap_bytes:
            raise UsageError(
                f"--dpp-memory-cap {bytes_text(self._cap_bytes)}: in {order} rank {rank} of a pipeline keeps {need} "
                f"bytes of activations between its tasks; give {bytes_text(need)} or more"
            )
        self.memory = memory
        return (
            f" dpp: in {order} a rank keeps up to {bytes_text(need)} of activations; --dpp-memory-cap is "
            f"{bytes_text(self._cap_bytes)}"
        )

    def tolerance_seconds(self, num_microbatches: int) -> float | None:
        """Return how late an input may be that a device waits for; None: its task is launched once it is there."""
        if self._schedule in {"dfc", "bfc"}:
            return None
        candidate = self.candidates.get(num_microbatches)
        return REACTION.lead_seconds if candidate is None else candidate.tolerance_seconds

    def policy(self, rank: int, num_microbatches: int) -> Policy:
        """Return the policy of a pipeline rank for one step. Raises UsageError if its order needs more than the cap."""
        if self.measures_memory:
            return Static(self._least_order(num_microbatches, rank))
        if self._schedule in {"dfc", "bfc"}:
            return Greedy(depth_first=self._schedule == "dfc", admitted=self._admitted(num_microbatches))
        if self._schedule == "zero-bubble":
            return Static(zero_bubble(self.placement, num_microbatches, rank))
        if self._schedule == "static":
            return Static(interleaved(self.placement, num_microbatches, rank))
        memory = self.memory[rank] if self.memory else None
        return self._candidate(num_microbatches).policy(self.placement, num_microbatches, rank, memory)

    def peak_chunks(self, num_microbatches: int) -> int:
        """Return the most chunks whose activations a rank keeps at a time in a step."""
        if self._schedule in {"dfc", "bfc"}:
            return self._admitted(num_microbatches) * self.placement.chunks
        if self._schedule == "zero-bubble":
            return max(
                peak_activations(zero_bubble(self.placement, num_microbatches, rank))
                for rank in range(self.placement.ranks)
            )
        planned = needed_chunks(self.placement, num_microbatches)
        return planned if self._schedule == "static" else planned + self.most_spare(num_microbatches)

    def slots(self, rank: int, num_microbatches: int) -> SlotLimits:
        """Return the slots that recordings of a pipeline rank's passes need in a step.

        They are exact where the order or the number of admitted microbatches is fixed. `auto` may spend its spare
        memory on any chunk: each gets what the static orders need of it and the spare chunks, at most a slot for each
        microbatch, and within a cap in bytes. Where a step leaves the plan so far that a chunk needs more, passes run
        without a recording.
        """
        chunks = self.placement.chunks
        if self._schedule in {"dfc", "bfc"}:
            return SlotLimits((self._admitted(num_microbatches),) * chunks)
        if self._schedule == "static":
            return slots_of_order(interleaved(self.placement, num_microbatches, rank), chunks)
        planned = slots_of_order(zero_bubble(self.placement, num_microbatches, rank), chunks)
        if self._schedule == "zero-bubble":
            return planned
        static = slots_of_order(with_weights(static_order(self.placement, num_microbatches, rank)), chunks)
        needed = tuple(map(max, planned.counts, static.counts))
        spares = range(self.most_spare(num_microbatches), -1, -1)
        counts = [tuple(min(num_microbatches, count + spare) for count in needed) for spare in spares]
        if self.memory:
            chunk_bytes = [chunk.activations for chunk in self.memory[rank].chunks]
            most = self.memory[rank].most
            counts = [each for each in counts if sum(map(operator.mul, each, chunk_bytes)) <= most] or counts[-1:]
        return SlotLimits(counts[0], is_exact=False)

    def report(self, num_microbatches: int) -> PlanReport:
        """Return what is published of the plan for steps of this size."""
        cap, spare = self.peak_chunks(num_microbatches), 0
        plan = ORDER_NAMES.get(self._schedule, "")
        if self._schedule == "zero-bubble":
            plan = f"{'ZB-V' if self.placement.shape is Shape.VEE else 'ZB-H1'}, weight gradients at planned places"
        elif self.is_tuned:
            candidate = self._candidate(num_microbatches)
            plan, spare = candidate.describe(self.placement), candidate.spare_chunks
            cap = needed_chunks(self.placement, num_microbatches) + spare
        return PlanReport(
            schedule=self._schedule,
            plan=plan,
            microbatches=num_microbatches,
            chunks=self.placement.chunks,
            cap_chunks=cap,
            spare_chunks=spare,
        )

    def most_spare(self, num_microbatches: int) -> int:
        """Return the chunks of memory that `auto` may use beyond the static order's on every rank.

        Raises:
            UsageError: the static order alone needs more than the cap.
        """
        planned, chunks = needed_chunks(self.placement, num_microbatches), self.placement.chunks
        most = num_microbatches * chunks - planned
        if self._cap is None:
            spare = max(1, planned // SPARE_DIVISOR) if self._cap_bytes is None else MOST_SPARE_CHUNKS
            return min(spare, most)
        if self._cap * chunks < planned:
            least = -(-planned // chunks)
            raise UsageError(
                f"--dpp-memory-cap {self._cap}: a rank keeps the activations of {least} microbatches at a time "
                f"even in the static order; give {least} or more"
            )
        return min(self._cap * chunks - planned, most)

    def _candidate(self, num_microbatches: int) -> Candidate:
        """Return the plan of `auto`: the chosen one, or before the choice the one whose steps are measured."""
        candidate = self.candidates.get(num_microbatches)
        if candidate is None:
            candidate = Candidate(plans_weights=False, spare_chunks=self.most_spare(num_microbatches))
        return candidate

    def _least_order(self, num_microbatches: int, rank: int) -> Order:
        """Return the order that keeps the least: one microbatch at a time, or the static order and W after each B."""
        if self._schedule not in {"dfc", "bfc"}:
            return with_weights(static_order(self.placement, num_microbatches, rank))
        chunks = range(self.placement.chunks)
        return tuple(
            task
            for microbatch in range(num_microbatches)
            for task in (
                *(Task.forward(microbatch, chunk) for chunk in chunks),
                *(Task.backward(microbatch, chunk) for chunk in reversed(chunks)),
            )
        )

    def _admitted(self, num_microbatches: int) -> int:
        """Return the microbatches that `dfc` and `bfc` admit; with a cap in bytes as many as fit on every rank."""
        admitted = min(self._cap or self.placement.ranks, num_microbatches)
        for limit in self.memory:
            admitted = min(admitted, limit.most // max(1, sum(chunk.activations for chunk in limit.chunks)))
        return admitted
