"""Choice of the plan and of the memory beyond it, by simulating a step with measured times."""

import dataclasses
import statistics
import zlib
from collections.abc import Callable, Mapping, Sequence

from megatronapp_trainer.pipeline.planning.device_simulator import DeviceModel, simulate_devices
from megatronapp_trainer.pipeline.planning.lateness import LaunchRule, UsualTimes
from megatronapp_trainer.pipeline.planning.memory import MemoryLimit
from megatronapp_trainer.pipeline.planning.orders import Order, interleaved, peak_in_flight, static_order, zero_bubble
from megatronapp_trainer.pipeline.planning.policies import PlanGuided, Policy, Static
from megatronapp_trainer.pipeline.planning.simulator import Simulation, simulate
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape, Task, TaskKind

HISTORIES = 4
"""Simulated steps of each candidate, with tasks and transfers drawn from the measured ones."""
LARGE_STEP = 256
"""Forward passes of a step, over all stages, above which half of them are simulated."""
SPARES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Chunks of memory beyond the plan's own need that are tried; more than some per rank fill no further waits."""
GOOD_ENOUGH = 1.005
"""Factor of the shortest step below which the candidate with the least memory is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTimes:
    """Times of the tasks and transfers of some steps."""

    task_seconds: Mapping[tuple[int, TaskKind, int], Sequence[float]]
    """All measured ones by (rank, kind, chunk); B and W apart if backward passes are split."""
    transfer_seconds: Sequence[float]
    """From the end of each task until its output was at the rank that takes it, late ones included; at least one."""

    @property
    def usual(self) -> UsualTimes:
        """Return the median of each task and of the transfers."""
        return UsualTimes(
            task_seconds={key: statistics.median(seconds) for key, seconds in self.task_seconds.items()},
            transfer_seconds=statistics.median(self.transfer_seconds),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostReaction:
    """How fast the hosts of devices are."""

    seconds: float
    """Time from the end of an input's copy until an idle device begins its task."""
    lead_seconds: float
    """Before a device runs dry its host decides on the next task."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Plan of all ranks and the chunks' activations that each may keep beyond the plan's own need."""

    plans_weights: bool
    """Weight tasks have planned places, those of `zero_bubble`; False: they only fill waits."""
    spare_chunks: int
    is_left: bool = True
    """Ranks run other tasks while the planned one waits; False: a static order, which plans its weight tasks."""
    tolerance_seconds: float | None = None
    """On devices a planned task is launched if its input is at most this late; None: once the input is there."""

    def describe(self, placement: Placement) -> str:
        """Return the plan as the log has it."""
        plan = f"order of {'megatron-core' if placement.shape is Shape.LOOP else 'ZB-V'}, weight gradients "
        plan += "at planned places" if self.plans_weights else "fill waits"
        early = ""
        if self.tolerance_seconds is not None:
            early = f", launched for inputs up to {1e3 * self.tolerance_seconds:.2f} ms late"
        if not self.is_left:
            return f"{plan}, never left"
        return f"{plan}, {self.spare_chunks} chunks of memory to spare{early}"

    def order(self, placement: Placement, num_microbatches: int, rank: int) -> Order:
        """Return the plan of a rank."""
        order = zero_bubble if self.plans_weights else static_order
        return order(placement, num_microbatches, rank)

    def cap(self, placement: Placement, num_microbatches: int, rank: int) -> int:
        """Return the most chunks whose activations a rank may keep."""
        needed = peak_in_flight(static_order(placement, num_microbatches, rank), (1,) * placement.chunks)
        return needed + self.spare_chunks

    def policy(
        self, placement: Placement, num_microbatches: int, rank: int, memory: MemoryLimit | None = None
    ) -> Policy:
        """Return the policy of a rank for one step; `memory`: what its tasks may keep besides the number of chunks."""
        if not self.is_left:
            return Static(self.order(placement, num_microbatches, rank))
        return PlanGuided(
            self.order(placement, num_microbatches, rank),
            cap=self.cap(placement, num_microbatches, rank),
            memory=memory,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanChoice:
    """A candidate and what the simulation expects of it."""

    candidate: Candidate
    seconds: float
    """Expected duration of the tasks of a step."""
    static_seconds: float
    """Duration under the static order: in a loop with whole backward passes, in a vee ZB-V."""
    static_bubble: float
    """Share of that in which a rank runs no task."""
    bubble: float
    """Expected share of the step in which a rank runs no task; mean over the ranks."""
    never_left: "PlanChoice | None" = None
    """Choice of the order that is never left, where this one is left and memory allows that order."""


def choose_candidate(
    placement: Placement,
    num_microbatches: int,
    times: MeasuredTimes,
    *,
    most_spare: int,
    reaction: HostReaction | None = None,
    memory: Sequence[MemoryLimit] = (),
    most_histories: int = HISTORIES,
    seed: int = 0,
) -> PlanChoice:
    """Return the candidate with the shortest simulated step; of nearly equal ones that with the least memory.

    Args:
        placement: stages of the model.
        num_microbatches: microbatches of a step.
        times: measured in earlier steps with split backward passes.
        most_spare: chunks beyond the plan's need that the memory allows on every rank.
        memory: limit of each rank in another unit, if any.
        reaction: of the hosts, where ranks have devices; None: hosts run the tasks themselves.
        most_histories: simulated steps of each candidate, at most.
        seed: of the draws from the measured times; equal on all ranks that must choose alike.
    """
    spares = sorted({0, most_spare, *(spare for spare in SPARES if spare < most_spare)})
    tolerances = (None,) if reaction is None else (reaction.lead_seconds, None)
    is_interleaved = placement.chunks > 1 and placement.shape is Shape.LOOP
    candidates = [
        Candidate(plans_weights=plans, spare_chunks=spare, tolerance_seconds=tolerance)
        for spare in spares
        for plans in ((False,) if is_interleaved else (False, True))
        for tolerance in tolerances
    ]
    followed = Candidate(plans_weights=True, spare_chunks=0, tolerance_seconds=tolerances[0], is_left=False)
    orders = [followed.order(placement, num_microbatches, rank) for rank in range(placement.ranks)]
    allows_followed = not memory or all(map(MemoryLimit.allows_order, memory, orders))
    if allows_followed:
        candidates.insert(0, followed)
    simulated = _Simulated(placement, num_microbatches, times, reaction, memory)
    histories = [f"{seed} {history}" for history in range(min(_histories(placement, num_microbatches), most_histories))]
    expected = {candidate: simulated.mean(candidate, histories) for candidate in candidates}
    candidate = _shortest(expected)
    if candidate.is_left and candidate.tolerance_seconds is not None:
        larger = dataclasses.replace(candidate, tolerance_seconds=min(times.usual.task_seconds.values()) / 4)
        expected[larger] = simulated.mean(larger, histories)
        candidate = _shortest({each: expected[each] for each in (candidate, larger)})
    seconds, bubble = expected[candidate]
    static = [simulated.static(history) for history in histories]
    choice = PlanChoice(
        candidate=candidate,
        seconds=seconds,
        static_seconds=statistics.mean(run.seconds for run in static),
        static_bubble=statistics.mean(run.mean_bubble for run in static),
        bubble=bubble,
    )
    if not candidate.is_left or not allows_followed:
        return choice
    seconds, bubble = expected[followed]
    never_left = dataclasses.replace(choice, candidate=followed, seconds=seconds, bubble=bubble)
    return dataclasses.replace(choice, never_left=never_left)


def _histories(placement: Placement, num_microbatches: int) -> int:
    """Return the number of simulated steps: fewer of large ones, which take long and draw from the times more often."""
    return HISTORIES if placement.stages * num_microbatches <= LARGE_STEP else HISTORIES // 2


def _shortest(expected: Mapping[Candidate, tuple[float, float]]) -> Candidate:
    """Return the first candidate whose seconds are nearly the shortest."""
    shortest = min(seconds for seconds, _ in expected.values())
    return next(each for each, (seconds, _) in expected.items() if seconds <= shortest * GOOD_ENOUGH)


class _Simulated:
    """Simulated steps; the same history gives all candidates the same tasks and transfers."""

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        times: MeasuredTimes,
        reaction: HostReaction | None,
        memory: Sequence[MemoryLimit],
    ) -> None:
        self._placement = placement
        self._num_microbatches = num_microbatches
        self._times = times
        self._usual = times.usual
        self._reaction = reaction
        self._memory = memory

    def mean(self, candidate: Candidate, histories: Sequence[str]) -> tuple[float, float]:
        """Return the mean seconds and the mean bubble of steps under a candidate."""
        runs = [self.guided(candidate, history) for history in histories]
        return statistics.mean(run.seconds for run in runs), statistics.mean(run.mean_bubble for run in runs)

    def guided(self, candidate: Candidate, history: str) -> Simulation:
        """Return a step under a candidate."""

        def policy(rank: int) -> Policy:
            memory = self._memory[rank] if self._memory else None
            return candidate.policy(self._placement, self._num_microbatches, rank, memory)

        return self._run(
            policy,
            history,
            split=True,
            tolerance=candidate.tolerance_seconds,
        )

    def static(self, history: str) -> Simulation:
        """Return a step in the static order, with whole backward passes; in a vee under ZB-V, which splits them."""
        split = self._placement.shape is Shape.VEE
        order = zero_bubble if split else interleaved
        return self._run(
            lambda rank: Static(order(self._placement, self._num_microbatches, rank)), history, split=split
        )

    def _run(
        self, policy: Callable[[int], Policy], history: str, *, split: bool, tolerance: float | None = None
    ) -> Simulation:
        def task_seconds(rank: int, task: Task) -> float:
            drawn = _draw(history, rank, task, self._times.task_seconds[rank, task.kind, task.chunk])
            if not split and task.kind is TaskKind.BACKWARD:
                weight = Task.weight(task.microbatch, task.chunk)
                drawn += _draw(history, rank, weight, self._times.task_seconds[rank, weight.kind, weight.chunk])
            return drawn

        def transfer_seconds(rank: int, task: Task) -> float:
            return _draw(history + " transfer", rank, task, self._times.transfer_seconds)

        policies = [policy(rank) for rank in range(self._placement.ranks)]
        if self._reaction is None:
            return simulate(
                self._placement,
                self._num_microbatches,
                policies,
                split=split,
                task_seconds=task_seconds,
                transfer_seconds=transfer_seconds,
            )
        ahead = LaunchRule(lead_seconds=self._reaction.lead_seconds, tolerance_seconds=tolerance)
        return simulate_devices(
            self._placement,
            self._num_microbatches,
            policies,
            split=split,
            model=DeviceModel(launch_rule=ahead, reaction_seconds=self._reaction.seconds, usual=self._usual),
            task_seconds=task_seconds,
            transfer_seconds=transfer_seconds,
        )


def _draw(history: str, rank: int, task: Task, measured: Sequence[float]) -> float:
    """Return one of the measured times, the same for equal arguments in every order of tasks."""
    return measured[zlib.crc32(f"{history} {rank} {task}".encode()) % len(measured)]
