"""The mode of each step on backward ranks: the first steps are measured, and `auto` then takes the fastest mode."""

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch.distributed as dist

from megatronapp_common.topology import FbdWorld
from megatronapp_trainer.config import ShipMode
from megatronapp_trainer.fbd.tuning.advice import PassSeconds, Roles, advise
from megatronapp_trainer.fbd.tuning.measured_steps import (
    MeasuredSteps,
    StepSeconds,
    covered_seconds,
    fastest_mode,
    slowest,
)
from megatronapp_trainer.pipeline.planning.tasks import Task
from megatronapp_trainer.pipeline.task_clocks import TaskClock
from megatronapp_trainer.training.forward_backward_report import ForwardBackwardReport, ModeReport

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Publishing:
    """Ways to users of a run; each is None on ranks that do not report."""

    line: Callable[[str], None] | None = None
    """Takes a line of text for the log."""
    report: Callable[[ForwardBackwardReport], None] | None = None
    """Takes what is in force from the step that begins."""


class ShipTuner:
    """Gives the mode of each step, and measures the first ones.

    All backward ranks of the job run the same steps, so they measure in the same modes without a word; they agree once,
    when the last measured step has ended.
    """

    def __init__(
        self,
        ship_bytes: Mapping[ShipMode, int],
        world: FbdWorld,
        clock: TaskClock,
        publishing: Publishing,
        *,
        forward_on_cpu: bool,
    ) -> None:
        """Begin to measure; collective over the backward ranks.

        Args:
            ship_bytes: of a microbatch that is shipped to this rank, for each mode that may be taken.
            world: ranks of both roles.
            clock: of this rank's passes.
            publishing: where results go.
            forward_on_cpu: whether backward ranks alone have GPUs.
        """
        self._world = world
        self._forward_on_cpu = forward_on_cpu
        self._clock = clock
        self._publishing = publishing
        self._steps: MeasuredSteps | None = MeasuredSteps(tuple(ship_bytes))
        self._ended: tuple[int, float, list[tuple[int, int]]] | None = None
        """Microbatches, forward seconds and copies of the step whose times the clock still has."""
        self._mode = next(iter(ship_bytes))
        by_rank = _gathered(dict(ship_bytes))
        self._report = ForwardBackwardReport(
            ship=self._mode,
            is_chosen=False,
            merged=world.merged,
            backward_per_forward=world.backward_per_forward,
            modes=tuple(
                ModeReport(ship=mode, ship_bytes=round(statistics.fmean(rank[mode] for rank in by_rank)))
                for mode in ship_bytes
            ),
        )
        self._published: ForwardBackwardReport | None = None

    def begin_step(self, num_microbatches: int) -> ShipMode:
        """Return the mode of the step that begins; collective over the backward ranks after the last measured one."""
        if self._steps is not None:
            self._take_times(self._steps)
            if self._steps.is_complete:
                self._choose(self._steps)
            else:
                self._mode = self._steps.begin_step(num_microbatches)
                self._report = dataclasses.replace(self._report, ship=self._mode)
                self._clock.begin_step({})
        if self._publishing.report is not None and self._report != self._published:
            self._publishing.report(self._report)
            self._published = self._report
        return self._mode

    @contextlib.contextmanager
    def timing(self, task: Task) -> Iterator[None]:
        """Time a task of the step within the context, if the step is measured."""
        if self._steps is None:
            yield
            return
        self._clock.begin(task)
        yield
        self._clock.end()

    def end_step(self, num_microbatches: int, *, forward_seconds: float, copies: Iterable[tuple[int, int]]) -> None:
        """Take what is known at the end of a step: passes of the forward rank, and times of copies in nanoseconds.

        Not called after a step that is no measure, as a captured one.
        """
        if self._steps is not None:
            self._ended = num_microbatches, forward_seconds, list(copies)

    def _take_times(self, steps: MeasuredSteps) -> None:
        """Read the times of the step before, which a device has ended by now."""
        ended, self._ended = self._ended, None
        times = self._clock.times()
        if ended is None or times is None:
            return
        microbatches, forward_seconds, copies = ended
        steps.end_step(
            StepSeconds(
                step=times.ended - times.begun,
                forward=forward_seconds,
                backward=sum(time.seconds for time in times.tasks) / microbatches,
                ship=covered_seconds(copies) / microbatches,
            )
        )

    def _choose(self, steps: MeasuredSteps) -> None:
        """Agree on the mode of all later steps, and report what was measured."""
        seconds = slowest(_gathered(steps.shortest()))
        self._steps = None
        self._mode = fastest_mode(seconds)
        own = PassSeconds(*seconds[self._mode][1:])
        world = self._world
        stages = world.trained.world_size // world.trained.data
        advice = advise(
            own,
            Roles(
                replicas=world.trained.data,
                served=world.backward_per_forward,
                stages=stages,
                merged=world.trained.tensor if world.merged else 1,
                forward_on_cpu=self._forward_on_cpu,
            ),
        )
        self._report = dataclasses.replace(
            self._report,
            ship=self._mode,
            is_chosen=len(seconds) > 1,
            forward_seconds=own.forward,
            backward_seconds=own.backward,
            ship_seconds=own.ship,
            modes=tuple(
                dataclasses.replace(mode, step_seconds=seconds[ShipMode(mode.ship)].step) for mode in self._report.modes
            ),
            advised_backward_per_forward=advice.backward_per_forward,
            advice=advice.sentence,
        )
        if self._publishing.line is not None:
            for line in _lines(self._report):
                self._publishing.line(line)


def _lines(report: ForwardBackwardReport) -> Iterator[str]:
    """Yield lines of the log on what was measured."""
    modes = "; ".join(
        f"{mode.ship} {mode.ship_bytes / 2**20:.2f} MiB a microbatch, {1e3 * (mode.step_seconds or 0):.1f} ms a step"
        for mode in report.modes
    )
    yield f" fbd: {modes}{f'; {report.ship} is chosen' if report.is_chosen else ''}"
    forward, backward, ship = (
        f"{1e3 * (seconds or 0):.1f} ms"
        for seconds in (report.forward_seconds, report.backward_seconds, report.ship_seconds)
    )
    yield f" fbd: a microbatch takes {forward} forward, {backward} backward, {ship} to ship; {report.advice}"


def _gathered(own: T) -> list[T]:
    """Return what each backward rank has; collective over them."""
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found
