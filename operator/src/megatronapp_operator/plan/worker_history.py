"""Ends of workers of the current attempt, recorded as soon as they are seen: pods may vanish before all are known."""

import dataclasses

from megatronapp_common.job.api.status import EndedWorker, Status
from megatronapp_operator.plan import outcome
from megatronapp_operator.plan.observed import Deletion, Observed, Worker, WorkerOutcome, WorkerPhase

MAX_ENDS = 8
"""Failed workers that are recorded; the first of them decides over the attempt."""
MAX_MESSAGE = 500
"""Characters that are kept of the end of their messages."""


def micros(seconds: float) -> float:
    """Round a time to the microsecond, so that it is the same after it was written and read."""
    return round(seconds, 6)


def whole_gang(observed: Observed, status: Status) -> tuple[Worker, ...]:
    """Return the workers of the current attempt, in order: those that exist and those on record."""
    found = {record.index: _failed(record, status.attempt) for record in status.ended}
    found |= {index: _succeeded(index, status.attempt) for index in status.succeeded}
    for worker in observed.workers:
        if worker.attempt == status.attempt:
            found[worker.index] = _known_end(worker, found.get(worker.index))
    return tuple(found[index] for index in sorted(found))


def _known_end(worker: Worker, recorded: Worker | None) -> Worker:
    """Return a worker with the end of its ranks that is on record: its launcher may not be able to report it again."""
    if recorded is None or recorded.phase is not WorkerPhase.FAILED or worker.phase is not WorkerPhase.RUNNING:
        return worker
    return dataclasses.replace(
        worker, phase=recorded.phase, outcome=recorded.outcome, finished_at=recorded.finished_at, standby=True
    )


def ended_worker_record(worker: Worker) -> EndedWorker:
    """Return the record of a worker that failed."""
    end, deletion = worker.outcome, worker.deletion
    return EndedWorker(
        index=worker.index,
        exit_code=None if end is None else end.code,
        reason=None if end is None else end.reason,
        message=None if end is None else end.message[-MAX_MESSAGE:],
        rank=None if end is None else end.rank,
        signal=None if end is None else end.signal,
        node=worker.node or None,
        disrupted=worker.disrupted or None,
        started_at=worker.started_at and micros(worker.started_at),
        finished_at=worker.finished_at and micros(worker.finished_at),
        deleted_at=None if deletion is None else micros(deletion.since),
        grace_seconds=None if deletion is None else deletion.grace_s,
    )


def first_ends(gang: tuple[Worker, ...]) -> tuple[EndedWorker, ...]:
    """Return the records of the failed workers that are kept, most likely culprit first."""
    return tuple(ended_worker_record(worker) for worker in outcome.failed(gang)[:MAX_ENDS])


def _failed(record: EndedWorker, attempt: int) -> Worker:
    """Return the failed worker that a record describes."""
    end = None
    if record.exit_code is not None:
        reason, message = record.reason or "", record.message or ""
        end = WorkerOutcome(
            code=record.exit_code, reason=reason, message=message, rank=record.rank, signal=record.signal
        )
    deletion = None
    if record.deleted_at is not None:
        deletion = Deletion(since=record.deleted_at, grace_s=record.grace_seconds or 0.0)
    return Worker(
        index=record.index,
        attempt=attempt,
        phase=WorkerPhase.FAILED,
        started_at=record.started_at,
        finished_at=record.finished_at,
        outcome=end,
        deletion=deletion,
        node=record.node,
        disrupted=record.disrupted,
    )


def _succeeded(index: int, attempt: int) -> Worker:
    return Worker(index=index, attempt=attempt, phase=WorkerPhase.SUCCEEDED, outcome=WorkerOutcome(code=0))
