"""Choice of the plan of `auto` from the times of the first steps, and comparison of its promise with later steps."""

import statistics
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatronapp_trainer.pipeline.dpp import DppPlan
from megatronapp_trainer.pipeline.planning.choice import MeasuredTimes, PlanChoice, choose_candidate
from megatronapp_trainer.pipeline.planning.tasks import TaskKind
from megatronapp_trainer.pipeline.step_times import StepTimes, median_seconds

WARM_UP_STEPS = 2
"""Steps before the measured ones: allocators and kernels are not warm in them."""
MEASURED_STEPS = 3
"""Steps whose times decide, and later steps that are compared with what was expected."""


class PlanTuner:
    """Measures some steps, chooses the plan of a pipeline's ranks, and reports how later steps compare."""

    def __init__(self, plan: DppPlan, group: Any, report: Callable[[str], None] | None) -> None:  # noqa: ANN401
        """Take the plan to tune.

        Args:
            plan: of this rank; replaced between steps.
            group: process group of the pipeline; its ranks call `end_step` alike.
            report: takes a line of text; None on ranks that do not report.
        """
        self._plan = plan
        self._group = group
        self._report = report
        self._warm_up = WARM_UP_STEPS
        self._steps: list[StepTimes] = []
        self._choice: PlanChoice | None = None
        self._done = False

    def end_step(self, times: StepTimes, num_microbatches: int) -> None:
        """Take the times of a step; collective over the pipeline at the end of the measured ones."""
        if self._done:
            return
        if self._warm_up:
            self._warm_up -= 1
            return
        self._steps.append(times)
        if len(self._steps) < MEASURED_STEPS:
            return
        if self._choice is None:
            self._choose(num_microbatches)
            self._warm_up = 1
        else:
            self._compare(self._choice)
            self._done = True
        self._steps = []

    def _choose(self, num_microbatches: int) -> None:
        transfers = [seconds for step in self._steps for seconds in step.transfers]
        own: tuple[dict[tuple[TaskKind, int], float], list[float]] = (median_seconds(self._steps), transfers)
        measured = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(measured, own, group=self._group)
        times = MeasuredTimes(
            task_seconds={
                (rank, kind, chunk): seconds
                for rank, (medians, _) in enumerate(measured)
                for (kind, chunk), seconds in medians.items()
            },
            transfer_seconds=[seconds for _, received in measured for seconds in received] or [0.0],
        )
        choice = choose_candidate(
            self._plan.placement, num_microbatches, times, most_spare=self._plan.most_spare(num_microbatches)
        )
        self._choice = choice
        self._plan.candidate = choice.candidate
        if self._report is not None:
            self._report(
                f" dpp: {choice.candidate}; expects {1e3 * choice.seconds:.1f} ms of passes in a step and "
                f"{choice.bubble:.0%} bubble, where the static order takes {1e3 * choice.static_seconds:.1f} ms"
            )

    def _compare(self, choice: PlanChoice) -> None:
        if self._report is None:
            return
        seconds = statistics.median(step.seconds for step in self._steps)
        ratio = seconds / choice.seconds
        self._report(f" dpp: {1e3 * seconds:.1f} ms of passes in a step, {ratio:.2f} times what was expected")
