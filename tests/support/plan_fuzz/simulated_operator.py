"""The operator in the model: it plans, checks its promises, and carries out part of the actions."""

import dataclasses
import math

from megatronapp_common.job import read_status, status_document
from megatronapp_operator.plan import (
    TERMINAL_PHASES,
    Action,
    AttemptTemplate,
    ConditionType,
    CreateInit,
    CreateWorker,
    Observed,
    Plan,
    Status,
    plan,
)
from plan_fuzz import promises
from plan_fuzz.world import World, template_of

FROZEN_PLANS = 40
REFUSED_S = 1.0


class Operator:
    """One operator after another; its only memory is the job's status."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stale: Observed | None = None
        self._stale_template = ""
        self.wake_at: float | None = None

    def reconcile(self, *, stop_after: int | None = None, stale: bool = False) -> Plan:
        """Reconcile the job once. `stop_after`: the operator ends after this number of actions."""
        world = self._world
        if self._stale_template != template_of(world):  # which pods fit a new template is known at once
            self._stale = None
        seen = self._stale if stale and self._stale is not None else world.observe()
        made = plan(world.job, seen, world.now)
        if _ends_attempt(world.job.status, made.status):
            seen = world.observe()
            made = plan(world.job, seen, world.now)
        promises.check(world, seen, made)
        self._stale, self._stale_template = seen if world.random.random() < 0.7 else None, template_of(world)
        ran = made.status.running_time is not None
        world.used |= {(worker.attempt, worker.index) for worker in seen.workers if ran or not worker.live}
        changed = made.status != world.job.status or bool(made.actions)
        world.job = dataclasses.replace(world.job, status=made.status)
        if changed:
            self._check_memory(seen, made)
        self._pin()
        if made.actions:
            world.refusal = None
            self._carry_out(made.actions, stop_after)
        promises.check_pods(world)
        self.wake_at = made.wake_at
        if world.refusal is not None:  # the reconciler looks again as soon as pods were refused
            self.wake_at = min(world.now + REFUSED_S, made.wake_at or math.inf)
        return made

    def _pin(self) -> None:
        """Pin the template as the reconciler does: that of a gang is settled with the decision to create it."""
        world, status = self._world, self._world.job.status
        if status.attempt_time is not None and (world.made is None or world.made.attempt != status.attempt):
            world.made = AttemptTemplate(
                attempt=status.attempt, template=world.spec.template, generation=world.spec.generation
            )

    def _carry_out(self, actions: tuple[Action, ...], stop_after: int | None) -> None:
        """Carry out the actions, removals first."""
        starts = (CreateWorker, CreateInit)
        ordered = sorted(actions, key=lambda action: isinstance(action, starts))
        for action in ordered[:stop_after]:
            self._stale = None  # what an operator does itself it knows at once
            self._world.do(action)

    def _check_memory(self, seen: Observed, made: Plan) -> None:
        """Check that the status can be written and read, and that feeding it back changes and reports nothing again."""
        world = self._world
        if read_status(status_document(made.status)) != made.status:
            promises.broken("the status is read otherwise than it was written")
        again = plan(world.job, seen, world.now)
        if again.status != made.status:
            changed = [
                field.name
                for field in dataclasses.fields(Status)
                if getattr(again.status, field.name) != getattr(made.status, field.name)
            ]
            promises.broken("the status is no fixpoint", changed)
        if len(promises.changes(again)) < len(again.actions):
            promises.broken("an event is told again", again.actions)

    def wait_frozen(self) -> None:
        """Nothing happens for long: every look has a later next one, or none."""
        world = self._world
        job, seen, now = world.job, world.observe(), world.now
        for _ in range(FROZEN_PLANS):
            made = plan(job, seen, now)
            job = dataclasses.replace(job, status=made.status)
            if made.wake_at is None:
                return
            if seen.profile is not None and seen.profile.attempt != made.status.attempt:
                seen = dataclasses.replace(seen, profile=dataclasses.replace(seen.profile, attempt=made.status.attempt))
            elif made.wake_at <= now:
                promises.broken("the next look at a world that stands still is in the past")
            now = made.wake_at


def _ends_attempt(before: Status, after: Status) -> bool:
    ends = after.phase in TERMINAL_PHASES and before.phase not in TERMINAL_PHASES
    fails = after.is_true(ConditionType.FAILURE_TARGET) and not before.is_true(ConditionType.FAILURE_TARGET)
    return ends or fails or after.attempt != before.attempt
