"""Statements that hold at any time of a job's life."""

from hypothesis.stateful import invariant

from megatronapp_common.job.api.status import Failure
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import TERMINAL_PHASES, ConditionType, CreateWorker, Phase, Plan, Worker, WorkerPhase
from plan_histories.events import JobHistory

ENDS = {
    Phase.SUCCEEDED: ConditionType.COMPLETE,
    Phase.FAILED: ConditionType.FAILED,
    Phase.SUSPENDED: ConditionType.SUSPENDED,
}
UNDERWAY = (ConditionType.RUNNING, ConditionType.RESTARTING, ConditionType.STALLED)


def check_culprit(failure: Failure, gang: tuple[Worker, ...]) -> None:
    """Check that no worker is blamed that stopped in order for another one. `gang`: as the plan has seen it."""
    blamed = next((worker for worker in gang if worker.index == failure.worker), None)
    if failure.exit_code != ExitCode.PREEMPTED or blamed is None or blamed.deletion or blamed.disrupted:
        return
    assert not any(_has_stopped_the_gang(worker) for worker in gang), (failure, gang)


def _has_stopped_the_gang(worker: Worker) -> bool:
    if not (worker.deletion or worker.disrupted):
        return False
    if worker.phase is not WorkerPhase.FAILED:
        return worker.live
    return worker.outcome is not None and worker.outcome.code == ExitCode.PREEMPTED


class JobInvariants(JobHistory):
    """Checks after every rule."""

    last: Plan | None = None
    planned_before_the_stop = True
    """True if the job had no request to stop at the last plan."""
    counters = (0, 0)
    """Attempt and restarts of the status."""
    end: tuple[Phase, float | None] | None = None

    @invariant()
    def attempts_do_not_overlap(self) -> None:
        assert len({worker.attempt for worker in self.job.observed.workers}) <= 1

    @invariant()
    def no_worker_lives_after_the_end(self) -> None:
        if self.job.state.status.phase in TERMINAL_PHASES:
            assert not any(worker.live for worker in self.job.observed.workers)

    @invariant()
    def a_stopped_job_starts_nothing(self) -> None:
        if self.job.state.stop is not None and self.last is not None:
            created = [action for action in self.last.actions if isinstance(action, CreateWorker)]
            assert not created or self.planned_before_the_stop

    @invariant()
    def counters_only_grow(self) -> None:
        status = self.job.state.status
        assert status.attempt >= self.counters[0]
        assert status.restarts >= self.counters[1]
        assert 0 <= status.restarts_towards_max <= min(status.restarts, self.job.state.spec.policy.max_restarts)
        self.counters = (status.attempt, status.restarts)

    @invariant()
    def the_end_is_final(self) -> None:
        status = self.job.state.status
        if self.end is not None:
            assert (status.phase, status.completion_time) == self.end
        elif status.phase in TERMINAL_PHASES:
            self.end = (status.phase, status.completion_time)

    @invariant()
    def conditions_agree_with_the_phase(self) -> None:
        status = self.job.state.status
        ended_as = {phase for phase, kind in ENDS.items() if status.is_true(kind)}
        assert ended_as == ({status.phase} & set(ENDS))
        if ended_as:
            assert not any(map(status.is_true, UNDERWAY))
        if status.phase is Phase.SUCCEEDED:
            assert not status.is_true(ConditionType.FAILURE_TARGET)
            assert "Interrupted" not in {condition.reason for condition in status.conditions}

    @invariant()
    def budgets_hold(self) -> None:
        status, policy = self.job.state.status, self.job.state.spec.policy
        assert status.init_restarts <= policy.max_restarts
        nodes = [excluded.node for excluded in status.excluded_nodes]
        assert len(nodes) == len(set(nodes)) <= policy.exclusion.max_nodes
