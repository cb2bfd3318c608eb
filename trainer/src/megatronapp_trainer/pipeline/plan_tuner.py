"""Choice of the plan of `auto` from the times of the first steps, and comparison of its promise with later steps."""

import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.planning.choice import MeasuredTimes, PlanChoice, choose_candidate
from megatronapp_trainer.pipeline.step_times import StepTimes, median_seconds

T = TypeVar("T")

WARM_UP_STEPS = 2
"""Steps before the measured ones: allocators and kernels are not warm in them."""
MEASURED_STEPS = 3
"""Steps whose times decide, and later steps that are compared with what was expected."""


class PlanTuner:
    """Measures some steps, chooses the plan of a pipeline's ranks, and reports how later steps compare.

    Steps of another number of microbatches, as in a ramp-up, get a plan of their own by the same times.
    """

    def __init__(self, plan: DppPlan, group: Any, report: Callable[[str], None] | None) -> None:  # noqa: ANN401
        """Take the plan to tune.

        Args:
            plan: of this rank; changed between steps.
            group: process group of the pipeline; its ranks call `begin_step` and `end_step` alike.
            report: takes a line of text; None on ranks that do not report.
        """
        self._plan = plan
        self._group = group
        self._report = report
        self._warm_up = WARM_UP_STEPS
        self._steps: list[StepTimes] = []
        self._times: MeasuredTimes | None = None
        self._compared: PlanChoice | None = None
        """Choice with which the next steps are compared."""

    def begin_step(self, num_microbatches: int) -> None:
        """Choose the plan for steps of this size, once the times are known."""
        if self._times is None or num_microbatches in self._plan.candidates:
            return
        choice = choose_candidate(
            self._plan.placement, num_microbatches, self._times, most_spare=self._plan.most_spare(num_microbatches)
        )
        self._plan.candidates[num_microbatches] = choice.candidate
        self._compared, self._warm_up, self._steps = choice, 1, []
        if self._report is not None:
            self._report(
                f" dpp: {num_microbatches} microbatches: {choice.candidate}; the passes of a step take "
                f"{1e3 * choice.seconds:.1f} ms in simulation, {choice.bubble:.0%} of them waiting, and "
                f"{1e3 * choice.static_seconds:.1f} ms in the static order"
            )

    def end_step(self, times: StepTimes) -> None:
        """Take the times of a step; collective over the pipeline after the measured and the compared ones."""
        if self._times is not None and self._compared is None:
            return
        if self._warm_up:
            self._warm_up -= 1
            return
        self._steps.append(times)
        if len(self._steps) < MEASURED_STEPS:
            return
        if self._compared is None:
            self._times = self._gathered_times()
        else:
            self._compare(self._compared)
            self._compared = None
        self._steps = []

    def _gathered_times(self) -> MeasuredTimes:
        transfers = [seconds for step in self._steps for seconds in step.transfers]
        measured = self._gather((median_seconds(self._steps), transfers))
        return MeasuredTimes(
            task_seconds={
                (rank, kind, chunk): seconds
                for rank, (medians, _) in enumerate(measured)
                for (kind, chunk), seconds in medians.items()
            },
            transfer_seconds=[seconds for _, received in measured for seconds in received] or [0.0],
        )

    def _compare(self, choice: PlanChoice) -> None:
        """Report the time from the first rank's beginning to the last rank's end, as simulations count it."""
        spans = self._gather([(step.begun, step.ended) for step in self._steps])
        if self._report is None:
            return
        seconds = statistics.median(
            max(ended for _, ended in step) - min(begun for begun, _ in step) for step in zip(*spans, strict=True)
        )
        ratio = seconds / choice.seconds
        self._report(f" dpp: the passes of a step take {1e3 * seconds:.1f} ms, {ratio:.2f} times the simulated time")

    def _gather(self, own: T) -> list[T]:
        """Return what each rank of the pipeline has; its ranks share a machine, and so its clock."""
        gathered = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        return gathered
