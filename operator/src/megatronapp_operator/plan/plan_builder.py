"""A plan in the making: policies read the job through it and add to it."""

import dataclasses
from typing import Any

from megatronapp_operator.plan import worker_history
from megatronapp_operator.plan.actions import Action, DeleteWorker, EventType, RecordEvent
from megatronapp_operator.plan.observed import Observed, Worker
from megatronapp_operator.plan.spec import JobState
from megatronapp_operator.plan.status import Condition, ConditionType, Status

MAX_REASON, MAX_MESSAGE = 1024, 32_768
"""Longest texts of a condition (metav1.Condition)."""


@dataclasses.dataclass(slots=True)
class PlanBuilder:
    """Mutable inside one call of `plan`, never beyond it."""

    job: JobState
    observed: Observed
    now: float
    status: Status
    actions: list[Action] = dataclasses.field(default_factory=list)
    wakes: list[float] = dataclasses.field(default_factory=list)
    _gang: tuple[int, tuple[Worker, ...]] | None = None
    _heard: dict[int, float | None] = dataclasses.field(default_factory=dict)

    @property
    def gang(self) -> tuple[Worker, ...]:
        """Workers of the current attempt: those that exist, and those that were seen to end before they vanished."""
        if self._gang is None or self._gang[0] != self.status.attempt:
            self._gang = (self.status.attempt, worker_history.whole_gang(self.observed, self.status))
        return self._gang[1]

    @property
    def live(self) -> tuple[Worker, ...]:
        """Workers of any attempt that may still run."""
        return tuple(one for one in self.observed.workers if one.live)

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - fields of Status
        """Replace fields of the status. Most looks change none, and a copy costs more than the comparison."""
        if any(getattr(self.status, name) != value for name, value in changes.items()):
            self.status = dataclasses.replace(self.status, **changes)

    def set_condition(self, kind: ConditionType, status: bool, reason: str, message: str) -> None:
        """Set a condition; `since` moves only when its status changes (metav1.Condition).

        Texts are cut to what the API takes: a status that it refuses would keep everything else from being written.
        """
        reason, message = reason[:MAX_REASON], message[:MAX_MESSAGE]
        old = self.status.condition(kind)
        since = old.since if old is not None and old.status == status else float(int(self.now))  # as metav1.Time
        new = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message,
            since=since,
            generation=self.job.spec.generation,
        )
        kept = tuple(new if one.type is kind else one for one in self.status.conditions)
        self.update(conditions=kept if old is not None else (*kept, new))

    def clear_condition(self, kind: ConditionType, reason: str, message: str) -> None:
        """Set a condition to false if it is true; a condition that never was stays absent."""
        if self.status.is_true(kind):
            self.set_condition(kind, False, reason, message)

    def event(self, kind: EventType, reason: str, message: str) -> None:
        """Tell people."""
        self.actions.append(RecordEvent(type=kind, reason=reason, message=message))

    def wake(self, at: float) -> None:
        """Plan again at this time at the latest; never so early that the plan would find it to come yet."""
        exact = worker_history.micros(at)
        self.wakes.append(exact if exact >= at else exact + 1e-6)

    def delete(self, worker: Worker, grace_s: float) -> None:
        """Ask a worker to go; ask again only to take back its grace, or when it has outlived its time."""
        lost_s, lost_at = self.job.spec.policy.lost_worker_s, self.lost_at(worker)
        if worker.deletion is not None and worker.deletion.grace_s == 0:
            self.wake(self.now + lost_s)  # killed, and not seen to be gone yet
            return
        if lost_at is not None and self.now >= lost_at:
            grace_s = 0.0
        elif lost_at is not None:
            self.wake(lost_at)
        if worker.deletion is None or grace_s == 0:
            self.actions.append(DeleteWorker(index=worker.index, attempt=worker.attempt, grace_s=grace_s))
            self.wake(self.now + grace_s + lost_s)

    def lost_at(self, worker: Worker) -> float | None:
        """When a worker that does not go, or whose machine does not answer, is given up; None: nothing is wrong."""
        heard = self._reachable_since(worker.attempt) if worker.unreachable_since is not None else None
        since = []
        if worker.unreachable_since is not None and heard is not None:
            since.append(max(worker.unreachable_since, heard, self._moved_at(worker.attempt)))
        if worker.deletion is not None:
            since.append(worker.deletion.since + worker.deletion.grace_s)
        return min(since) + self.job.spec.policy.lost_worker_s if since else None

    def _moved_at(self, attempt: int) -> float:
        """When progress of a gang was last heard of. No gang goes on without one of its workers, so all lived then,
        whatever their machines tell the API server; one that stands still since is given up in its time."""
        told = self.status.current_progress
        return 0.0 if told is None or told.attempt != attempt else self.status.progress_time or 0.0

    def _reachable_since(self, attempt: int) -> float | None:
        """Since when something is heard of a gang; None: no machine of a whole gang on several of them is heard of.

        That is the way to the API server, not the machines: the gang may well train. When the machines come back one
        by one, the time of those that are still to come begins with the first.
        """
        if attempt not in self._heard:
            gang = [one for one in self.observed.workers if one.attempt == attempt]
            several = len({one.node for one in gang}) > 1 and len(gang) >= self.job.spec.workers
            known = (one.reachable_since or 0.0 for one in gang if one.unreachable_since is None)
            self._heard[attempt] = min(known, default=None) if several else 0.0
        return self._heard[attempt]
