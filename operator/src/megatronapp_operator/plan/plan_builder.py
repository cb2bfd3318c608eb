"""Plan under construction: policies read the job through it and add to it."""

import dataclasses
from typing import Any

from megatronapp_common.job.api.status import Condition, ConditionType, Status
from megatronapp_operator.plan import worker_history
from megatronapp_operator.plan.actions import Action, DeleteWorker, EventType, RecordEvent
from megatronapp_operator.plan.observed import Observed, Worker
from megatronapp_operator.plan.spec import JobState

MAX_REASON, MAX_MESSAGE = 1024, 32_768
"""Most characters that a condition may have (metav1.Condition)."""


@dataclasses.dataclass(slots=True)
class PlanBuilder:
    """Mutable state of one call of `plan`; never kept after it."""

    job: JobState
    observed: Observed
    now: float
    status: Status
    actions: list[Action] = dataclasses.field(default_factory=list)
    wakes: list[float] = dataclasses.field(default_factory=list)
    _gang: tuple[int, tuple[Worker, ...]] | None = None
    _reachable: dict[int, float | None] = dataclasses.field(default_factory=dict)

    @property
    def gang(self) -> tuple[Worker, ...]:
        """Workers of the current attempt: those that exist, and those that were seen to end before they vanished."""
        if self._gang is None or self._gang[0] != self.status.attempt:
            self._gang = (self.status.attempt, worker_history.whole_gang(self.observed, self.status))
        return self._gang[1]

    @property
    def resized_in(self) -> int:
        """First attempt with the current size of the gang; workers of earlier ones know another number of workers."""
        return 0 if self.status.gang_size is None else self.status.gang_size.since_attempt

    @property
    def live(self) -> tuple[Worker, ...]:
        """Workers of any attempt that may still run, and spares."""
        return tuple(worker for worker in self.observed.pods if worker.live)

    @property
    def missing_indices(self) -> list[int]:
        """Indices of the workers, of all groups, that are missing from the gang."""
        existing = {worker.index for worker in self.gang}
        indices = (index for group in self.job.spec.worker_groups for index in group.indices)
        return [index for index in indices if index not in existing]

    def update(self, **changes: Any) -> None:  # noqa: ANN401 - fields of Status
        """Replace fields of the status. Most reconciles change none, and a copy costs more than the comparison."""
        if any(getattr(self.status, name) != value for name, value in changes.items()):
            self.status = dataclasses.replace(self.status, **changes)

    def set_condition(self, kind: ConditionType, status: bool, reason: str, message: str) -> None:
        """Set a condition; `since` moves only when its status changes (metav1.Condition).

        Too long texts are truncated to the limits of the API: if it rejected the status, nothing would be stored.
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
        replaced = tuple(new if condition.type is kind else condition for condition in self.status.conditions)
        self.update(conditions=replaced if old is not None else (*replaced, new))

    def clear_condition(self, kind: ConditionType, reason: str, message: str) -> None:
        """Set a condition to false if it is true; a condition that was never set stays absent."""
        if self.status.is_true(kind):
            self.set_condition(kind, False, reason, message)

    def event(self, kind: EventType, reason: str, message: str) -> None:
        """Add an Event for users."""
        self.actions.append(RecordEvent(type=kind, reason=reason, message=message))

    def wake(self, at: float) -> None:
        """Plan again at this time at the latest.

        Rounds up to the microsecond, so that the plan does not wait once more.
        """
        exact = worker_history.micros(at)
        self.wakes.append(exact if exact >= at else exact + 1e-6)

    def delete(self, worker: Worker, grace_s: float) -> None:
        """Stop a worker; repeat the request only to shorten its grace period, or once it has outlived it."""
        lost_s, lost_at = self.job.spec.policy.lost_worker_s, self.lost_at(worker)
        if worker.deletion is not None and worker.deletion.grace_s == 0:
            self.wake(self.now + lost_s)  # killed, and not seen to be deleted yet
            return
        if lost_at is not None and self.now >= lost_at:
            grace_s = 0.0
        elif lost_at is not None:
            self.wake(lost_at)
        if worker.deletion is None or grace_s == 0:
            self.actions.append(
                DeleteWorker(index=worker.index, attempt=worker.attempt, grace_s=grace_s, spare=worker.spare)
            )
            self.wake(self.now + grace_s + lost_s)

    def lost_at(self, worker: Worker) -> float | None:
        """Return when a worker that does not end, or whose node does not answer, is given up; None: all is well."""
        reachable_since = self._reachable_since(worker.attempt) if worker.unreachable_since is not None else None
        since = []
        if worker.unreachable_since is not None and reachable_since is not None:
            since.append(max(worker.unreachable_since, reachable_since, self._moved_at(worker.attempt)))
        if worker.deletion is not None:
            since.append(worker.deletion.since + worker.deletion.grace_s)
        return min(since) + self.job.spec.policy.lost_worker_s if since else None

    def _moved_at(self, attempt: int) -> float:
        """Return the time of the last progress of a gang.

        No gang makes progress without each of its workers, so all were alive then, even if the API server reports
        for their nodes. A gang without progress since then is given up in its time.
        """
        progress = self.status.current_progress
        return 0.0 if progress is None or progress.attempt != attempt else self.status.progress_time or 0.0

    def _reachable_since(self, attempt: int) -> float | None:
        """Return since when a node of a gang has reported; None: no node of a whole gang on several nodes reports.

        Then the network to the API server has failed and not the nodes: the gang may well be training. When the nodes
        return one by one, the time of those that are still unreachable begins with the first.
        """
        if attempt not in self._reachable:
            gang = [worker for worker in self.observed.workers if worker.attempt == attempt]
            several = len({worker.node for worker in gang}) > 1 and len(gang) >= self.job.spec.workers
            known = (worker.reachable_since or 0.0 for worker in gang if worker.unreachable_since is None)
            self._reachable[attempt] = min(known, default=None) if several else 0.0
        return self._reachable[attempt]
