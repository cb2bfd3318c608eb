"""Events that may happen to a job between two plans, as rules of a state machine."""

import dataclasses

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import (
    Deletion,
    HubPhase,
    LeavingNode,
    PodRejection,
    Progress,
    SlowRank,
    StopRequest,
    Worker,
    WorkerOutcome,
    WorkerPhase,
)
from plan_histories.simulated_job import SimulatedJob

CODES = [*ExitCode, 137, 2, 201]


class JobHistory(RuleBasedStateMachine):
    """State machine of one job, which an initial rule makes."""

    job: SimulatedJob

    def draw_worker(self, data: st.DataObject) -> Worker:
        return data.draw(st.sampled_from(self.job.observed.workers))


has_workers = precondition(lambda self: self.job.observed.workers)
has_init = precondition(lambda self: self.job.observed.init is not None)


class WorkerEvents(JobHistory):
    """Events of workers and of their nodes."""

    @has_workers
    @rule(data=st.data())
    def worker_runs(self, data: st.DataObject) -> None:
        worker = self.draw_worker(data)
        if worker.phase is WorkerPhase.PENDING:
            self.job.change(worker, phase=WorkerPhase.RUNNING)

    @has_workers
    @rule(data=st.data(), code=st.sampled_from(CODES), late=st.floats(0, 3))
    def worker_ends(self, data: st.DataObject, code: int, late: float) -> None:
        worker = self.draw_worker(data)
        if worker.live:
            phase = WorkerPhase.FAILED if code else WorkerPhase.SUCCEEDED
            finished_at = self.job.now - late
            self.job.change(worker, phase=phase, outcome=WorkerOutcome(code=code), finished_at=finished_at)

    @has_workers
    @rule()
    def all_succeed(self) -> None:
        success = WorkerOutcome(code=0)
        for worker in self.job.observed.workers:
            if worker.live:
                self.job.change(worker, phase=WorkerPhase.SUCCEEDED, outcome=success, finished_at=self.job.now)

    @has_workers
    @rule(data=st.data())
    def worker_vanishes(self, data: st.DataObject) -> None:
        vanished = self.draw_worker(data)
        self.job.observe(workers=tuple(worker for worker in self.job.observed.workers if worker != vanished))

    @rule()
    def deleted_workers_vanish(self) -> None:
        self.job.observe(workers=tuple(worker for worker in self.job.observed.workers if worker.deletion is None))

    @has_workers
    @rule(data=st.data(), reason=st.none() | st.just("Evicted"), grace=st.floats(1, 60))
    def worker_is_deleted(self, data: st.DataObject, reason: str | None, grace: float) -> None:
        """Delete a worker as the cluster or a user may."""
        worker = self.draw_worker(data)
        if worker.live and worker.deletion is None:
            self.job.change(worker, disrupted=reason, deletion=Deletion(since=self.job.now, grace_s=grace))

    @has_workers
    @rule(data=st.data(), answers=st.booleans())
    def node_is_silent_or_answers(self, data: st.DataObject, answers: bool) -> None:
        worker = self.draw_worker(data)
        if worker.live and worker.node is not None:
            self.job.change(worker, unreachable_since=None if answers else self.job.now)

    @has_workers
    @rule(data=st.data())
    def worker_is_placed(self, data: st.DataObject) -> None:
        worker = self.draw_worker(data)
        if worker.live:
            self.job.change(worker, scheduled=True, node=f"node-{worker.index + worker.attempt}")

    @rule(has_nodes=st.booleans())
    def free_nodes_change(self, has_nodes: bool) -> None:
        self.job.has_nodes = has_nodes

    @rule(final=st.integers(0, 4))
    def creation_is_refused(self, final: int) -> None:
        attempt = self.job.state.status.attempt
        self.job.observe(
            refusal=PodRejection(attempt=attempt, final=final == 0, reason="QuotaExceeded", message="full")
        )


class JobEvents(JobHistory):
    """Events of initializer, hub, reports and users."""

    @has_init
    @rule(reason=st.none() | st.just("Evicted"), silent=st.booleans())
    def init_is_disrupted(self, reason: str | None, silent: bool) -> None:
        unreachable_since = self.job.now if silent else None
        self.job.change_init(disrupted=reason, unreachable_since=unreachable_since, begun_at=self.job.now)

    @has_init
    @rule(phase=st.sampled_from(WorkerPhase), vanishes=st.booleans())
    def init_changes(self, phase: WorkerPhase, vanishes: bool) -> None:
        init = self.job.observed.init
        if vanishes or init is None:
            self.job.observe(init=None)
        elif init.live:
            self.job.change_init(phase=phase)

    @rule(node=st.none() | st.integers(0, 3))
    def node_is_cordoned(self, node: int | None) -> None:
        leaving = () if node is None else (LeavingNode(name=f"node-{node}", reason="is cordoned"),)
        self.job.observe(leaving_nodes=leaving)

    @rule(age=st.floats(-60, 60))
    def checkpoint_is_reported(self, age: float) -> None:
        """Report a checkpoint, also by a clock that is ahead of ours."""
        before, attempt = self.job.observed.progress, self.job.state.status.attempt
        iteration = 1 if before is None or before.attempt != attempt else before.iteration + 1
        time = float(int(self.job.now - age))
        self.job.observe(
            progress=Progress(
                attempt=attempt, iteration=iteration, checkpoint_iteration=iteration, checkpoint_time=time
            )
        )

    @rule(vanishes=st.booleans())
    def budget_is_forgotten(self, vanishes: bool) -> None:
        """Start another operator, or delete the budget as another client may, which a comparison finds."""
        self.job.budget &= not vanishes
        self.job.observe(disruption_budget=None)

    @rule(age=st.none() | st.floats(0, 200))
    def last_contact_changes(self, age: float | None) -> None:
        self.job.observe(last_contact=None if age is None else self.job.now - age)

    @rule(waiting=st.none() | st.sampled_from(["ErrImagePull: no", "ImagePullBackOff", "Unschedulable: full"]))
    def hub_waits(self, waiting: str | None) -> None:
        if self.job.observed.hub is not None:
            self.job.change_hub(waiting=waiting)

    @rule(ended=st.booleans())
    def hub_changes(self, ended: bool) -> None:
        if self.job.observed.hub is not None:
            phase = HubPhase.ENDED if ended else HubPhase.READY
            self.job.change_hub(phase=phase, ended_at=self.job.now if ended else None)

    @rule(node=st.integers(0, 3), age=st.floats(0, 60), none=st.booleans())
    def hub_judges(self, node: int, age: float, none: bool) -> None:
        verdict = SlowRank(
            id=f"v{node}",
            subject="node",
            ranks=(),
            cause="compute",
            state="confirmed",
            sentence="Slow.",
            slowdown=1.5,
            node=f"node-{node}",
            since_attempt=self.job.state.status.attempt,
            since_time=round(self.job.now - age, 6),
        )
        self.job.observe(slow_ranks=() if none else (verdict,))

    @rule(iteration=st.integers(0, 50), attempt=st.integers(0, 5))
    def progress_is_read(self, iteration: int, attempt: int) -> None:
        self.job.observe(progress=Progress(attempt=attempt, iteration=iteration))

    @rule(suspend=st.booleans())
    def suspension_changes(self, suspend: bool) -> None:
        state = self.job.state
        self.job.state = dataclasses.replace(state, spec=dataclasses.replace(state.spec, suspend=suspend))

    @rule(force=st.booleans())
    @precondition(lambda self: self.job.now > 1300)
    def user_stops(self, force: bool) -> None:
        state = self.job.state
        force = force or (state.stop is not None and state.stop.force)
        self.job.state = dataclasses.replace(state, stop=StopRequest(reason="Interrupted", message="", force=force))
