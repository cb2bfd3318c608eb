"""A job, what is observed of it, and a backend that carries out each action at once."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    TERMINAL_PHASES,
    Action,
    CreateInit,
    CreateWorker,
    DeleteHub,
    DeleteInit,
    DeleteJob,
    DeleteWorker,
    Deletion,
    EnsureDisruptionBudget,
    EnsureHub,
    EnsureSecret,
    HubPhase,
    HubState,
    InitPod,
    JobState,
    Observed,
    Plan,
    PodGroupKey,
    RemoveDisruptionBudget,
    RemoveGroup,
    RequestCheckpoint,
    Worker,
    WorkerOutcome,
    WorkerPhase,
    plan,
)


@dataclasses.dataclass
class SimulatedJob:
    """State of the job and of the world around it."""

    state: JobState
    observed: Observed = dataclasses.field(default_factory=Observed)
    now: float = 1000.0
    has_nodes: bool = True
    """True while a node is free for each new worker."""
    judged: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    """Attempt and index of workers that a plan has seen after their end."""
    budget: bool = False
    """True while a budget refuses evictions."""
    groups: set[int] = dataclasses.field(default_factory=set)
    """Attempts of which a scheduler keeps a group."""

    def observe(self, **changes: Any) -> None:
        self.observed = dataclasses.replace(self.observed, **changes)

    def change(self, worker: Worker, **changes: Any) -> None:
        changed = dataclasses.replace(worker, **changes)
        self.observe(workers=tuple(changed if known == worker else known for known in self.observed.workers))

    def run_all(self) -> None:
        """End the initializer with success, and place and run all workers that are not deleted."""
        if self.observed.init is not None and self.observed.init.live:
            self.change_init(phase=WorkerPhase.SUCCEEDED)
        for worker in self.observed.workers:
            if worker.phase is WorkerPhase.PENDING and worker.deletion is None:
                node = f"node-{worker.index + worker.attempt}"
                self.change(worker, phase=WorkerPhase.RUNNING, scheduled=True, node=node)

    def stop_for(self, leaving: Worker, late: Sequence[float], *, ends: bool) -> None:
        """Delete a worker, for which all end in order, each some seconds ago. `ends`: False: it has yet to end."""
        self.change(leaving, deletion=Deletion(since=self.now - max(late), grace_s=60))
        for worker in self.observed.workers:
            if worker.live and (ends or worker.index != leaving.index):
                finished_at = self.now - late[worker.index]
                outcome = WorkerOutcome(code=ExitCode.PREEMPTED)
                self.change(worker, phase=WorkerPhase.FAILED, outcome=outcome, finished_at=finished_at)

    def change_hub(self, **changes: Any) -> None:
        assert self.observed.hub is not None
        self.observe(hub=dataclasses.replace(self.observed.hub, **changes))

    def change_init(self, **changes: Any) -> None:
        assert self.observed.init is not None
        self.observe(init=dataclasses.replace(self.observed.init, **changes))

    def plan(self) -> Plan:
        """Plan and store the new status."""
        self._finish_workloads()
        made = plan(self.state, self.observed, self.now)
        self.judged |= {(worker.attempt, worker.index) for worker in self.observed.workers if not worker.live}
        self.state = dataclasses.replace(self.state, status=made.status)
        return made

    def carry_out(self, action: Action) -> None:
        match action:
            case EnsureSecret():
                self.observe(secret=True)
            case EnsureHub():
                starts = 1 if self.observed.hub is None else self.observed.hub.starts + 1
                self.observe(hub=HubState(phase=HubPhase.STARTING, starts=starts))
            case DeleteHub():
                self.change_hub(deleting=True)
            case CreateInit():
                assert self.state.status.phase not in TERMINAL_PHASES
                assert self.observed.init is None and not self.state.status.initialized
                self.observe(init=InitPod(phase=WorkerPhase.PENDING, created_at=self.now))
            case DeleteInit():
                assert self.observed.init is not None
                self.observe(init=None if action.force else dataclasses.replace(self.observed.init, deleting=True))
            case DeleteJob():
                assert self.state.status.phase in TERMINAL_PHASES
                self.state = dataclasses.replace(self.state, deletion_requested=True)
            case CreateWorker():
                self._create(action)
            case DeleteWorker() | RequestCheckpoint():
                self._change_worker(action)
            case RemoveGroup() | EnsureDisruptionBudget() | RemoveDisruptionBudget():
                self._change_objects(action)

    def _create(self, action: CreateWorker) -> None:
        assert self.state.status.phase not in TERMINAL_PHASES
        assert self.state.status.initialized or not self.state.spec.initializers
        assert all(worker.index != action.index for worker in self.observed.workers)
        assert (action.attempt, action.index) not in self.judged, "a worker that has ended is started again"
        worker = Worker(
            index=action.index,
            attempt=action.attempt,
            phase=WorkerPhase.PENDING,
            started_at=self.now,
            scheduled=self.has_nodes,
        )
        self.observe(workers=(*self.observed.workers, worker))
        self.groups.add(action.attempt)

    def _change_worker(self, action: DeleteWorker | RequestCheckpoint) -> None:
        if isinstance(action, DeleteWorker):
            self._delete(action)
            return
        target = next(worker for worker in self.observed.workers if worker.index == action.index)
        assert target.attempt == action.request.attempt and self.budget, "no eviction waits for this checkpoint"
        self.change(target, save_request=action.request)

    def _delete(self, action: DeleteWorker) -> None:
        target = next(
            worker
            for worker in self.observed.workers
            if (worker.index, worker.attempt) == (action.index, action.attempt)
        )
        queued = self.state.spec.group is PodGroupKey.WORKLOAD
        grace_s = 0.0 if queued and not target.scheduled else action.grace_s
        self.change(target, deletion=Deletion(since=self.now, grace_s=grace_s))
        has_finalizer = queued and action.attempt in self.groups and target.live
        if grace_s == 0 and not has_finalizer:
            self.observe(workers=tuple(worker for worker in self.observed.workers if worker.index != action.index))

    def _change_objects(self, action: RemoveGroup | EnsureDisruptionBudget | RemoveDisruptionBudget) -> None:
        if isinstance(action, RemoveGroup):
            self._remove_group(action)
            return
        self.budget = isinstance(action, EnsureDisruptionBudget)
        assert not self.budget or self.state.status.phase not in TERMINAL_PHASES
        self.observe(disruption_budget=self.budget)

    def _remove_group(self, action: RemoveGroup) -> None:
        members = [worker for worker in self.observed.workers if worker.attempt == action.attempt]
        assert not any(worker.live and worker.deletion is None for worker in members), "a needed gang loses its group"
        self.groups.discard(action.attempt)
        self.observe(groups_removed=frozenset({action.attempt, *self.observed.groups_removed}))
        if self.state.spec.group is PodGroupKey.WORKLOAD:
            self.observe(workers=tuple(worker for worker in self.observed.workers if worker not in members))

    def _finish_workloads(self) -> None:
        """Remove killed pods as Kueue does, once all pods of their group have ended."""
        if self.state.spec.group is not PodGroupKey.WORKLOAD:
            return
        live_attempts = {worker.attempt for worker in self.observed.workers if worker.live}
        killed = [
            worker for worker in self.observed.workers if worker.deletion is not None and worker.deletion.grace_s == 0
        ]
        self.observe(
            workers=tuple(
                worker for worker in self.observed.workers if worker not in killed or worker.attempt in live_attempts
            )
        )
