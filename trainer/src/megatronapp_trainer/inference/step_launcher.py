"""Launching of the steps of an engine, each before the answers of the step before it are read if nothing prevents it.

A device that gets a step only after the tokens of the last one have been read waits for the host between any two steps.
"""

import contextlib
import dataclasses
from typing import Any

from megatronapp_trainer.hooks.forward_observer import DISCARD
from megatronapp_trainer.inference.model.sampling import PendingOutputs, SampledOutput
from megatronapp_trainer.inference.perturbed_steps import RankRecipes
from megatronapp_trainer.inference.scheduler import ScheduledStep, Scheduler
from megatronapp_trainer.inference.worker_group import WorkerGroup


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the ranks compute, whose answers have not been read."""

    scheduled: ScheduledStep
    outputs: PendingOutputs | None

    def ended(self) -> tuple[str, ...]:
        """Return the requests that ended after the step was planned: their rows mean nothing."""
        rows = self.scheduled.rows if self.scheduled.plan.is_ahead else ()
        return tuple(row.sequence.request.id for row in rows if row.sequence.ended is not None)


class StepLauncher:
    """Launcher of the steps that a scheduler plans. Used in the engine's thread, except `commands`."""

    def __init__(
        self,
        gang: WorkerGroup,
        scheduler: Scheduler,
        recipes: RankRecipes,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._gang = gang
        self._scheduler = scheduler
        self._recipes = recipes
        self._lock = lock
        self.commands: list[tuple[str, Any]] = []
        """Commands of the next step boundary. Protected by the lock."""
        self._ahead: LaunchedStep | None = None

    @property
    def is_ahead(self) -> bool:
        """Return true if a step has been launched of which `launch` was not called."""
        return self._ahead is not None

    def launch(self) -> LaunchedStep | None:
        """Return the step that was launched ahead, or launch the next one after all commands; None without work."""
        if (ahead := self._take_ahead()) is not None:
            return ahead
        planned = self._scheduler.plan()
        with self._lock:
            commands, self.commands = self.commands, []
        for topic, payload in commands:
            self._gang.command(topic, payload)
        if planned is None:
            return None
        for source in planned.sources:
            self._recipes.add(source.recipe, source.lengths)
        self._recipes.add(planned.recipe)
        return LaunchedStep(planned, self._gang.launch(planned.plan))

    def launch_ahead(self, step: ScheduledStep) -> None:
        """Launch the step that follows this one, unless commands or other requests are due before it."""
        if not self._gang.schedules_ahead:
            return
        with self._lock:
            planned = None if self.commands else self._scheduler.plan_ahead(step)
        if planned is not None and self._recipes.knows(planned.recipe):
            self._ahead = LaunchedStep(planned, self._gang.launch(planned.plan))

    def read(self, launched: LaunchedStep) -> tuple[SampledOutput, ...]:
        """Return the answers of a step, in the order of its rows; waits for them."""
        return self._gang.read(launched.scheduled.plan, launched.outputs)

    def finish(self) -> None:
        """Wait for a step that was launched ahead, and discard it."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.read(ahead)

    def _take_ahead(self) -> LaunchedStep | None:
        """Return the step that was launched ahead; None without one, or after all of its requests have ended."""
        ahead = self._ahead
        if ahead is not None and (ended := ahead.ended()):
            self._gang.command(DISCARD, ended)
            if len(ended) == len(ahead.scheduled.rows):
                self.finish()
                return None
        self._ahead = None
        return ahead
