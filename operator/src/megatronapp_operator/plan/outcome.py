"""Ends of workers: which of them is the evidence, and how it is told."""

import signal
from collections.abc import Sequence

from megatronapp_common.names import ExitCode
from megatronapp_operator.plan import reasons
from megatronapp_operator.plan.observed import Worker, WorkerOutcome, WorkerPhase
from megatronapp_operator.plan.status import Failure, FailureAction

SUSPICION = {ExitCode.RENDEZVOUS: 1, ExitCode.PEER_LOST: 2}
"""Codes that say "somebody else is the reason": an own failure (0) outranks them, however late it is seen."""

NOT_STARTED = "WorkerNotStarted"
"""Reason of the outcome of a worker that a backend could not start: it has no log, and no exit code of its own."""

UNKNOWN = WorkerOutcome(code=ExitCode.OWN_FAILURE, reason="Unknown", message="the worker left no record")


def outcome_of(worker: Worker) -> WorkerOutcome:
    """The worker's outcome, or one that says that there is none."""
    return worker.outcome or UNKNOWN


def suspicion(worker: Worker) -> int:
    """0 for an own failure; more, the less this worker can be the culprit."""
    code = outcome_of(worker).code
    return next((level for known, level in SUSPICION.items() if known == code), 0)


def failed(workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """Workers that failed, most likely culprit first: own failures before lost peers, then by time."""
    found = (one for one in workers if one.phase is WorkerPhase.FAILED)
    return tuple(sorted(found, key=lambda one: (suspicion(one), one.finished_at or 0.0, one.index)))


def succeeded(workers: Sequence[Worker]) -> bool:
    """Whether all of them have ended with success."""
    return all(one.phase is WorkerPhase.SUCCEEDED for one in workers)


def preempted(workers: Sequence[Worker]) -> bool:
    """Whether all of them have ended as asked: with a checkpoint, before they began, or with success."""
    left = (one for one in workers if one.phase is not WorkerPhase.SUCCEEDED)
    return all(one.phase is WorkerPhase.FAILED and outcome_of(one).code == ExitCode.PREEMPTED for one in left)


def settles_at(culprits: Sequence[Worker], gang: Sequence[Worker], settle_s: float) -> float | None:
    """Until when to wait for the culprit's own record; None: the first of `culprits` is the evidence already.

    The victims' launchers may report before the culprit's does. Judging their record would restart a job whose data
    are corrupt, again and again.
    """
    if not culprits or suspicion(culprits[0]) == 0 or not any(one.live for one in gang):
        return None
    return min(one.finished_at or 0.0 for one in culprits) + settle_s


def missing_indices(workers: Sequence[Worker], wanted: int) -> list[int]:
    """Indices of the workers of a gang of `wanted` that are not there."""
    return sorted(set(range(wanted)) - {one.index for one in workers})


def failure_of(worker: Worker, job: str, now: float, action: FailureAction) -> Failure:
    """What is kept of a worker that failed, and what is done about it."""
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
    """What is kept of workers that are gone with all that they knew, as after a preemption."""
    return Failure(
        time=now,
        attempt=attempt,
        worker=indices[0],
        reason=reasons.WORKER_LOST,
        message=f"worker {', '.join(map(str, indices[:8]))}{' and others' if len(indices) > 8 else ''} vanished",
        action=FailureAction.RESTART_IGNORE_MAX,
    )


def unreachable_failure(worker: Worker, now: float, after_s: float) -> Failure:
    """What is kept of a worker whose machine does not answer, or that was asked to go and is still there."""
    how = f"is still there {after_s:g} s after its time to stop was over"
    if worker.unreachable_since is not None and now >= worker.unreachable_since + after_s:
        how = f"is out of reach: its machine has not answered for {after_s:g} s"
    return _lost_node(worker, now, how, FailureAction.RESTART_IGNORE_MAX)


def silent_worker_failure(worker: Worker, now: float) -> Failure:
    """What is kept of a worker that its peers have lost, and that has neither ended nor been heard of since.

    Nobody but they says so: it counts, and the machine is avoided.
    """
    how = "has not ended, while its peers have lost it: its machine is taken for lost"
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
    """How a worker of this job ended, by its last words, and where to read the others."""
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
    """Words for a worker that was killed because it was to go by force, or had not gone in its time; else None."""
    outcome, deletion = outcome_of(worker), worker.deletion
    if deletion is None or outcome.rank is not None or outcome.signal != signal.SIGKILL:
        return None
    if deletion.grace_s == 0:
        return f"worker {worker.index} was killed, as asked"
    if worker.finished_at is None or worker.finished_at < deletion.since + deletion.grace_s:
        return None
    return f"worker {worker.index} was killed: it had not ended {deletion.grace_s:g} s after it was asked to stop"
