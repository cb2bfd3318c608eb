"""Ends of workers: which of them is the evidence of a failure, and how a message describes it."""

import signal
from collections.abc import Sequence

from megatronapp_common.job.api.status import Failure, FailureAction
from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.observed import Worker, WorkerOutcome, WorkerPhase

SUSPICION = {ExitCode.RENDEZVOUS: 1, ExitCode.PEER_LOST: 2}
"""Rank of exit codes that blame another worker. An own failure (0) outranks them, however late it is seen."""

NOT_STARTED = "WorkerNotStarted"
"""Reason of a worker that a backend could not start: it has neither a log nor an exit code."""

UNKNOWN = WorkerOutcome(code=ExitCode.OWN_FAILURE, reason="Unknown", message="the worker left no record")


def outcome_of(worker: Worker) -> WorkerOutcome:
    """Return the outcome of the worker, or `UNKNOWN` if it left none."""
    return worker.outcome or UNKNOWN


def suspicion(worker: Worker) -> int:
    """Return 0 for an own failure, and more the less likely it is that this worker is the culprit."""
    code = outcome_of(worker).code
    return next((level for known, level in SUSPICION.items() if known == code), 0)


def deleted_first(worker: Worker) -> bool:
    """Return True if the worker was deleted before it ended.

    The plan deletes no worker of an attempt that it still judges, so a queue, an autoscaler or a user did. The exit
    code then only says what the worker had to save.
    """
    deletion = worker.deletion
    return deletion is not None and (worker.finished_at is None or deletion.since <= worker.finished_at)


def stopped_with_gang(worker: Worker) -> bool:
    """Return True if a worker ended in order although nothing is known to have ended it.

    All ranks of a gang stop at the same step, whichever worker was asked to: this one says nothing about the cause.
    """
    leaves = worker.deletion is not None or worker.disrupted is not None
    return outcome_of(worker).code == ExitCode.PREEMPTED and not leaves


def failed(workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """Return the workers that failed, most likely culprit first: own failures before lost peers, then by time.

    If the first of them only stopped with its gang, those precede it that were deleted or disrupted, however much later
    they ended. Clocks of nodes differ, so a deleted worker that ended in order may seem to have ended before that.
    """
    found = [worker for worker in workers if worker.phase is WorkerPhase.FAILED]
    found.sort(key=lambda worker: (suspicion(worker), worker.finished_at or 0.0, worker.index))
    if found and stopped_with_gang(found[0]):
        found.sort(key=lambda worker: not _was_taken(worker))
    return tuple(found)


def _was_taken(worker: Worker) -> bool:
    """Return True if a worker that has ended was deleted or disrupted before that."""
    in_order = worker.deletion is not None and outcome_of(worker).code == ExitCode.PREEMPTED
    return worker.disrupted is not None or in_order or deleted_first(worker)


def succeeded(workers: Sequence[Worker]) -> bool:
    """Return True if all workers have succeeded."""
    return all(worker.phase is WorkerPhase.SUCCEEDED for worker in workers)


def preempted(workers: Sequence[Worker]) -> bool:
    """Return True if all workers have stopped in order: with a checkpoint, before they began, or with success."""
    left = (worker for worker in workers if worker.phase is not WorkerPhase.SUCCEEDED)
    return all(worker.phase is WorkerPhase.FAILED and outcome_of(worker).code == ExitCode.PREEMPTED for worker in left)


def settles_at(culprits: Sequence[Worker], gang: Sequence[Worker], settle_s: float) -> float | None:
    """Return the time until which to wait for the culprit's own record; None: the first of `culprits` is the evidence.

    The launchers of victims may report before the culprit's does. Judging their record would restart a job whose data
    are corrupt, again and again. A gang that stops in order names the wrong worker if the cause is still ending.
    """
    if not culprits or all(worker.ended for worker in gang):
        return None
    if suspicion(culprits[0]) == 0 and not stopped_with_gang(culprits[0]):
        return None
    return min(worker.finished_at or 0.0 for worker in culprits) + settle_s


def failure_of(worker: Worker, job: str, now: float, action: FailureAction) -> Failure:
    """Return the failure of an attempt whose evidence is this worker, to be answered by `action`."""
    end = outcome_of(worker)
    return Failure(
        time=round(worker.finished_at or now, 6),
        attempt=worker.attempt,
        worker=worker.index,
        node=worker.node,
        rank=end.rank,
        exit_code=end.code,
        signal=end.signal,
        reason=worker.disrupted or end.reason or reasons.WORKER_FAILED,
        message=describe(worker, job),
        action=action,
    )


def lost_workers_failure(indices: Sequence[int], attempt: int, now: float) -> Failure:
    """Return the failure of an attempt whose workers vanished without a record, as after a preemption."""
    return Failure(
        time=now,
        attempt=attempt,
        worker=indices[0],
        reason=reasons.WORKER_LOST,
        message=f"worker {', '.join(map(str, indices[:8]))}{' and others' if len(indices) > 8 else ''} vanished",
        action=FailureAction.RESTART_IGNORE_MAX,
    )


def leaving_failure(worker: Worker, stopped: Worker, job: str, now: float) -> Failure:
    """Return the failure for a deleted or disrupted worker that has not ended yet, although its gang has stopped.

    `stopped`: a worker that has ended with the gang.
    """
    return Failure(
        time=round(stopped.finished_at or now, 6),
        attempt=worker.attempt,
        worker=worker.index,
        node=worker.node,
        reason=worker.disrupted or outcome_of(stopped).reason or reasons.WORKER_FAILED,
        message=f"worker {worker.index} is being deleted, and the gang has stopped: {describe(stopped, job)}",
        action=FailureAction.RESTART_IGNORE_MAX,
    )


def unreachable_failure(worker: Worker, now: float, after_s: float) -> Failure:
    """Return the failure for a worker whose node does not answer, or that has outlived its grace period."""
    how = f"still exists {after_s:g} s after its grace period was over"
    if worker.unreachable_since is not None and now >= worker.unreachable_since + after_s:
        how = f"is unreachable: its node has not answered for {after_s:g} s"
    return _lost_node(worker, now, how, FailureAction.RESTART_IGNORE_MAX)


def silent_worker_failure(worker: Worker, now: float) -> Failure:
    """Return the failure for a worker that its peers have lost, and that has neither ended nor reported since.

    Only its peers say so: the restart counts against the budget, and the node is avoided.
    """
    how = "has not ended, but its peers have lost it; its node is considered lost"
    return _lost_node(worker, now, how, FailureAction.EXCLUDE_AND_RESTART)


def _lost_node(worker: Worker, now: float, how: str, action: FailureAction) -> Failure:
    where = "" if worker.node is None else f" on {worker.node}"
    return Failure(
        time=now,
        attempt=worker.attempt,
        worker=worker.index,
        node=worker.node,
        reason=reasons.LOST_NODE,
        message=f"worker {worker.index}{where} {how}",
        action=action,
    )


def describe(worker: Worker, job: str) -> str:
    """Describe how a worker of this job ended, with the last line of its message and the command for its log."""
    outcome = outcome_of(worker)
    if outcome.reason == NOT_STARTED:
        return f"worker {worker.index} could not be started: {outcome.message}"
    killed = _killed_on_purpose(worker)
    if killed is not None:
        return killed
    where = f"worker {worker.index}" if outcome.rank is None else f"rank {outcome.rank} on worker {worker.index}"
    how = f"exit code {outcome.code}" if outcome.signal is None else f"signal {outcome.signal}"
    lines = [line.strip() for line in outcome.message.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    whose = f"--worker {worker.index}" if outcome.rank is None else f"--rank {outcome.rank}"
    return f"{where} failed with {how}{last} (megatronapp logs {job} {whose} --attempt {worker.attempt})"


def _killed_on_purpose(worker: Worker) -> str | None:
    """Return the message for a worker that was killed by force or after its grace period; None for any other."""
    outcome, deletion = outcome_of(worker), worker.deletion
    if deletion is None or outcome.rank is not None or outcome.signal != signal.SIGKILL:
        return None
    if deletion.grace_s == 0:
        return f"worker {worker.index} was killed, as requested"
    if worker.finished_at is None or worker.finished_at < deletion.since + deletion.grace_s:
        return None
    return f"worker {worker.index} was killed: it had not ended {deletion.grace_s:g} s after the request to stop"
