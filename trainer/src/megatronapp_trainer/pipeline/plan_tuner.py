"""Choice of the plan of `auto` from the times of the first steps, and comparison of its promise with later steps."""

import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.planning.choice import (
    LARGE_STEP,
    HostReaction,
    MeasuredTimes,
    PlanChoice,
    choose_candidate,
)
from megatronapp_trainer.pipeline.planning.lateness import UsualTimes
from megatronapp_trainer.pipeline.planning.other_placements import SimulatedPlacement, other_placements, times_in
from megatronapp_trainer.pipeline.planning.tasks import Placement, RankTask, TaskKind
from megatronapp_trainer.pipeline.task_clocks import StepTimes

T = TypeVar("T")

WORTH_A_START = 0.99
"""Factor of the time of a step below which the log names another placement."""

WARM_UP_STEPS = 2
"""Steps before the measured ones: allocators and kernels are not warm in them."""
MEASURED_STEPS = 3
"""Steps whose times decide, and later steps that are compared with what was expected."""
REVIEWED_STEPS = 20
"""Steps of one size after which their length is compared with the usual one."""
LONGER = 1.1
"""Factor on the usual length of a step from which the plans are compared again, by the newest times."""


class PlanTuner:
    """Measures some steps, chooses the plan of a pipeline's ranks, and reports how later steps compare.

    Steps of another number of microbatches, as in a ramp-up, get a plan of their own by the same times.
    """

    def __init__(
        self,
        plan: DppPlan,
        group: Any,  # noqa: ANN401
        report: Callable[[str], None] | None,
        reaction: HostReaction | None = None,
        *,
        layers_of_rank: int | None = None,
        has_vee: bool = True,
    ) -> None:
        """Take the plan to tune.

        Args:
            plan: of this rank; changed between steps.
            group: process group of the pipeline; its ranks call `begin_step` and `end_step` alike.
            report: takes a line of text; None on ranks that do not report.
            reaction: of the hosts of devices; None: hosts run the tasks themselves.
            layers_of_rank: for advice on the number of chunks; None where ranks have different numbers of layers.
            has_vee: the model can be placed in a vee.
        """
        self._plan = plan
        self._group = group
        self._report = report
        self._reaction = reaction
        self._layers_of_rank = layers_of_rank
        self._has_vee = has_vee
        self._warm_up = WARM_UP_STEPS
        self._steps: list[StepTimes] = []
        self._times: MeasuredTimes | None = None
        self.usual: UsualTimes | None = None
        """Medians of the measured times of all ranks; None until they are measured."""
        self._compared: PlanChoice | None = None
        """Choice with which the next steps are compared."""
        self._compared_size = 0
        """Number of microbatches of those steps."""
        self.choices: dict[int, PlanChoice] = {}
        """Choices by the number of microbatches."""
        self.measured_seconds: dict[int, float] = {}
        """Measured length of the passes of a step under it."""
        self._guided: tuple[PlanChoice, float] | None = None
        """A choice that is left, and its measured length, while the order that is never left is measured."""
        self._size = 0
        """Number of microbatches of the newest step."""
        self._usual_seconds: dict[int, float] = {}
        """Usual length of the passes of a step under the chosen plan, by the number of microbatches."""

    def begin_step(self, num_microbatches: int) -> None:
        """Choose the plan for steps of this size, once the times are known."""
        if num_microbatches != self._size and self._times is not None:
            self._steps = []  # steps of several sizes have no common length
            self._abandon_trial()
        self._size = num_microbatches
        if self._times is None or num_microbatches in self._plan.candidates:
            return
        choice = choose_candidate(
            self._plan.placement,
            num_microbatches,
            self._times,
            most_spare=self._plan.most_spare(num_microbatches),
            reaction=self._reaction,
            memory=self._plan.memory,
        )
        self._try(choice, num_microbatches)
        if self._report is not None:
            self._report(
                f" dpp: {num_microbatches} microbatches: {choice.candidate.describe(self._plan.placement)}; the passes "
                f"of a step take {1e3 * choice.seconds:.1f} ms in simulation, {choice.bubble:.0%} of them waiting, and "
                f"{1e3 * choice.static_seconds:.1f} ms in the static order"
            )
            for other in self._faster_placements(num_microbatches):
                self._report(
                    f" dpp: {num_microbatches} microbatches: by the same times they take {1e3 * other.seconds:.1f} ms "
                    f"with {other.flags}, which the model is built with"
                )

    def _faster_placements(self, num_microbatches: int) -> list[SimulatedPlacement]:
        """Return the other placements whose steps are shorter in simulation by what is worth another start.

        All, this one as well, are simulated in one step, which takes a fraction of the time of the choice.
        """
        placement = self._plan.placement
        is_large = placement.stages * num_microbatches > LARGE_STEP
        if self._layers_of_rank is None or self._plan.has_byte_cap or is_large or self._times is None:
            return []
        possible = other_placements(placement, num_microbatches, self._layers_of_rank, has_vee=self._has_vee)
        own, *others = [
            SimulatedPlacement(placement=simulated, seconds=choice.seconds)
            for simulated in (placement, *possible)
            if (choice := self._quick_choice(simulated, num_microbatches, self._times)) is not None
        ]
        faster = [other for other in others if other.seconds <= WORTH_A_START * own.seconds]
        return sorted(faster, key=lambda simulated: simulated.seconds)

    def _quick_choice(self, placement: Placement, num_microbatches: int, times: MeasuredTimes) -> PlanChoice | None:
        """Return the choice in a placement by one simulated step; None if its order needs more memory than the cap."""
        try:
            most_spare = self._plan.moved_to(placement).most_spare(num_microbatches)
        except UsageError:
            return None
        times = times_in(times, self._plan.placement, placement)
        return choose_candidate(
            placement, num_microbatches, times, most_spare=most_spare, reaction=self._reaction, most_histories=1
        )

    def end_step(self, times: StepTimes) -> None:
        """Take the times of a step; collective over the pipeline after the measured, compared and reviewed ones."""
        if self._times is not None and self._compared is None:
            self._review(times)
            return
        if self._warm_up:
            self._warm_up -= 1
            return
        self._steps.append(times)
        if len(self._steps) < MEASURED_STEPS:
            return
        if self._compared is None:
            self._times = self._gathered_times()
            self.usual = self._times.usual
        else:
            self._end_trial(self._compared)
        self._steps = []

    def _review(self, times: StepTimes) -> None:
        """Forget the choices, so that plans are compared again, once steps have become longer."""
        self._steps.append(times)
        if len(self._steps) < REVIEWED_STEPS:
            return
        seconds = self._measured_length()
        usual = self._usual_seconds.setdefault(self._size, seconds)
        if seconds <= LONGER * usual:
            self._usual_seconds[self._size] = min(usual, seconds)
            self._steps = []
            return
        if self._report is not None:
            self._report(
                f" dpp: the passes of a step of {self._size} microbatches take {1e3 * seconds:.1f} ms instead of "
                f"{1e3 * usual:.1f} ms; the plans are compared again"
            )
        self._steps = self._steps[-MEASURED_STEPS:]
        self._times = self._gathered_times()
        self.usual = self._times.usual
        self._plan.candidates.clear()
        self._usual_seconds.clear()
        self._steps = []

    def _try(self, choice: PlanChoice, num_microbatches: int) -> None:
        """Let the next steps run under a choice, and compare them with what it promises."""
        self._plan.candidates[num_microbatches] = choice.candidate
        self.choices[num_microbatches] = choice
        self.measured_seconds.pop(num_microbatches, None)
        self._compared, self._compared_size, self._warm_up, self._steps = choice, num_microbatches, 1, []

    def _end_trial(self, choice: PlanChoice) -> None:
        """Report the length of the steps under a choice; of a plan that is left and the order keep the faster one.

        The simulation knows the time that hosts need for their decisions by a constant alone, and an order that is
        never left needs none. Both are measured, so that no user pays for that.
        """
        size, seconds = self._compared_size, self._compare(choice)
        if choice.never_left is not None:
            self._guided = choice, seconds
            self._try(choice.never_left, size)
            return
        self._compared = None
        self._usual_seconds[size] = seconds
        if self._guided is None:
            return
        guided, guided_seconds = self._guided
        self._guided = None
        stays = "the order that is never left"
        if guided_seconds <= seconds:
            stays = "the first one"
            self._plan.candidates[size], self.choices[size] = guided.candidate, guided
            self.measured_seconds[size] = self._usual_seconds[size] = guided_seconds
        if self._report is not None:
            self._report(
                f" dpp: {size} microbatches: of {1e3 * guided_seconds:.1f} ms with the plan that is left while inputs "
                f"are late and {1e3 * seconds:.1f} ms with the order that is never left, {stays} is kept"
            )

    def _abandon_trial(self) -> None:
        """End a trial whose steps have another size now; of two plans the one that has been measured stays."""
        if self._guided is not None:
            choice, seconds = self._guided
            self._plan.candidates[self._compared_size] = choice.candidate
            self.choices[self._compared_size] = choice
            self.measured_seconds[self._compared_size] = seconds
        self._compared = self._guided = None

    def _gathered_times(self) -> MeasuredTimes:
        gathered = self._gather((_boot_id(), self._steps))
        steps, boot_ids = [steps for _, steps in gathered], [boot_id for boot_id, _ in gathered]
        return measured_times(self._plan.placement, steps, boot_ids)

    def _compare(self, choice: PlanChoice) -> float:
        """Return the length of the steps under a choice, and report it next to what the choice promises."""
        seconds = self._measured_length()
        self.measured_seconds[self._compared_size] = seconds
        if self._report is not None:
            ratio = seconds / choice.seconds
            self._report(
                f" dpp: the passes of a step take {1e3 * seconds:.1f} ms, {ratio:.2f} times the simulated time"
            )
        return seconds

    def _measured_length(self) -> float:
        """Return the time from the first rank's beginning to the last rank's end, as simulations count it: the median.

        Clocks of several machines have nothing in common: there it is the longest time of a rank.
        """
        gathered = self._gather((_boot_id(), [(step.begun, step.ended) for step in self._steps]))
        steps = list(zip(*(spans for _, spans in gathered), strict=True))
        if len({boot_id for boot_id, _ in gathered}) == 1:
            lengths = [max(ended for _, ended in step) - min(begun for begun, _ in step) for step in steps]
        else:
            lengths = [max(ended - begun for begun, ended in step) for step in steps]
        seconds: float = statistics.median(lengths)
        return seconds

    def _gather(self, own: T) -> list[T]:
        """Return what each rank of the pipeline has."""
        gathered = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        return gathered


def _boot_id() -> str:
    """Return what only processes with the same monotonic clock have in common."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()


def measured_times(
    placement: Placement, steps: Sequence[Sequence[StepTimes]], boot_ids: Sequence[str]
) -> MeasuredTimes:
    """Return lengths of tasks and transfers from the times of some steps by pipeline rank.

    A transfer lasts from the end of the task that sends until its output is at the rank that takes it. Between ranks of
    different machines (`boot_ids`) the offset of their clocks is taken out, as NTP does it: the shortest transfers of
    both directions are assumed to last as long as each other.
    """
    task_seconds: dict[tuple[int, TaskKind, int], list[float]] = {}
    transfer_seconds = []
    between: dict[tuple[int, int], list[float]] = {}
    """Received less sent, each on its rank's clock, by sender and receiver."""
    for step in zip(*steps, strict=True):
        ends = {RankTask(rank, time.task): time.ended for rank, times in enumerate(step) for time in times.tasks}
        for rank, times in enumerate(step):
            for time in times.tasks:
                task_seconds.setdefault((rank, time.task.kind, time.task.chunk), []).append(time.seconds)
            transfer_seconds += times.transfers
            for task, received in times.received.items():
                source = placement.previous_task(rank, task)
                assert source is not None
                between.setdefault((source.rank, rank), []).append(received - ends[source])
    for (sender, receiver), differences in between.items():
        offset = 0.0
        if boot_ids[sender] != boot_ids[receiver]:
            shortest, back = min(differences), between.get((receiver, sender))
            offset = shortest if back is None else (shortest - min(back)) / 2
        transfer_seconds += [max(difference - offset, 0.0) for difference in differences]
    return MeasuredTimes(task_seconds=task_seconds, transfer_seconds=transfer_seconds or [0.0])
