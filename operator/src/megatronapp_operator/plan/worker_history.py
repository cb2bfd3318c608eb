"""Ends of workers of the current attempt, recorded as soon as they are seen: pods may vanish before all are known."""

import dataclasses

from megatronapp_operator.plan import outcome
from megatronapp_operator.plan.observed import Observed, Worker, WorkerOutcome, WorkerPhase
from megatronapp_operator.plan.status import Status

MAX_ENDS = 8
"""Failed workers that are recorded; the first of them decides over the attempt."""
MAX_MESSAGE = 500
"""Characters that are kept of the end of their messages."""


def micros(seconds: float) -> float:
    """Round a time to the microsecond, so that it is the same after it was written and read."""
    return round(seconds, 6)


def whole_gang(observed: Observed, status: Status) -> tuple[Worker, ...]:
    """Return the workers of the current attempt, in order: those that exist and those on record."""
    found = {one.index: one for one in status.ended}
    found |= {index: _succeeded(index, status.attempt) for index in status.succeeded}
    found |= {one.index: one for one in observed.workers if one.attempt == status.attempt}
    return tuple(found[index] for index in sorted(found))


def ended_worker_record(worker: Worker) -> Worker:
    """Return the record of a worker that failed."""
    deletion = worker.deletion and dataclasses.replace(worker.deletion, since=micros(worker.deletion.since))
    return Worker(
        index=worker.index,
        attempt=worker.attempt,
        phase=WorkerPhase.FAILED,
        started_at=worker.started_at and micros(worker.started_at),
        finished_at=worker.finished_at and micros(worker.finished_at),
        outcome=_shortened(worker.outcome),
        deletion=deletion,
        node=worker.node or None,
        disrupted=worker.disrupted or None,
    )


def first_ends(gang: tuple[Worker, ...]) -> tuple[Worker, ...]:
    """Return the records of the failed workers that are kept, most likely culprit first."""
    return tuple(ended_worker_record(one) for one in outcome.failed(gang)[:MAX_ENDS])


def _shortened(end: WorkerOutcome | None) -> WorkerOutcome | None:
    return None if end is None else dataclasses.replace(end, message=end.message[-MAX_MESSAGE:])


def _succeeded(index: int, attempt: int) -> Worker:
    return Worker(index=index, attempt=attempt, phase=WorkerPhase.SUCCEEDED, outcome=WorkerOutcome(code=0))
