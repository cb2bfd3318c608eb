"""The plan's status as JSON for users and programs: camelCase, RFC 3339 times, without absent values.

It holds everything that the plan remembers (`status_reader` parses it), because an operator may end between two plans.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from megatronapp_operator.plan import Condition, ExcludedNode, Failure, Progress, SlowRank, Status, Worker
from megatronapp_operator.plan_io.times import rfc3339, rfc3339_micro, seconds_of

__all__ = ["progress_document", "rfc3339", "seconds_of", "status_document", "without_none"]


def status_document(status: Status) -> dict[str, Any]:
    """Return the `status` of a MegatronJob, without what only the backend knows (sizes, rank table, hub)."""
    replicas = dataclasses.asdict(status.replicas)
    if status.trains:
        replicas["ready"] = status.replicas.running
    return without_none(
        {
            "phase": status.phase.value,
            "observedGeneration": status.generation,
            "conditions": [_condition(one) for one in status.conditions],
            "attempt": status.attempt,
            "restarts": status.restarts,
            "restartsTowardsMax": status.restarts_towards_max,
            **_times(status),
            "replicaStatuses": replicas,
            "progress": None if status.progress is None else progress_document(status.progress),
            "slowRanks": [_slow_rank(one) for one in status.slow_ranks],
            "slowNode": status.slow_node,
            "hungRanks": list(status.hung_ranks),
            "lastControl": status.last_control,
            "failures": [_failure(one) for one in status.failures],
            "podGroups": None if status.groups is None else list(status.groups),
            "activeSeconds": status.active_s or None,
            "initialized": status.initialized,
            "initRestarts": status.init_restarts,
            "initClearing": status.init_clearing or None,
            "released": status.released,
            "excludedNodes": [_excluded(one) for one in status.excluded_nodes],
            "toleratedNodes": [_excluded(one) for one in status.tolerated_nodes],
            "rankZeroWorker": status.rank_zero,
            "succeededWorkers": ranges(status.succeeded),
            "endedWorkers": [_ended(one) for one in status.ended],
        }
    )


def progress_document(page: Progress) -> dict[str, Any]:
    """Return a progress document as in the contract, without absent values."""
    fields = dataclasses.asdict(page) | {"updated_at": rfc3339(page.updated_at)}
    return without_none({_camel(name): value for name, value in fields.items()})


def without_none(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document without keys whose value is None."""
    return {key: value for key, value in document.items() if value is not None}


def ranges(numbers: Iterable[int]) -> str | None:
    """Write rising numbers as in "0-3,7" (the form of a Job's completedIndexes); None for no numbers."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(parts) or None


def _times(status: Status) -> dict[str, Any]:
    return {
        "startTime": rfc3339_micro(status.start_time),
        "attemptTime": rfc3339_micro(status.attempt_time),
        "holdingTime": rfc3339_micro(status.holding_time),
        "unplacedTime": rfc3339_micro(status.unplaced_time),
        "scheduledTime": rfc3339_micro(status.scheduled_time),
        "runningTime": rfc3339_micro(status.running_time),
        "progressTime": rfc3339_micro(status.progress_time),
        "lastRestartTime": rfc3339_micro(status.last_restart_time),
        "releasedTime": rfc3339_micro(status.released_time),
        "deniedTime": rfc3339_micro(status.denied_time),
        "initFailedTime": rfc3339_micro(status.init_failed_time),
        "completionTime": rfc3339_micro(status.completion_time),
    }


def _condition(one: Condition) -> dict[str, Any]:
    return {
        "type": one.type.value,
        "status": str(one.status),
        "reason": one.reason,
        "message": one.message,
        "lastTransitionTime": rfc3339(one.since),
        "observedGeneration": one.generation,
    }


def _failure(one: Failure) -> dict[str, Any]:
    fields = dataclasses.asdict(one) | {"time": rfc3339_micro(one.time), "action": one.action.value}
    return without_none({_camel(name): value for name, value in fields.items()})


def _excluded(one: ExcludedNode) -> dict[str, Any]:
    return {"node": one.node, "reason": one.reason, "until": rfc3339_micro(one.until)}


def _ended(one: Worker) -> dict[str, Any]:
    """Describe how a worker failed; its attempt is that of the status."""
    outcome, deletion = one.outcome, one.deletion
    end = {} if outcome is None else {"exitCode": outcome.code, "reason": outcome.reason, "message": outcome.message}
    return without_none(
        {
            "index": one.index,
            **end,
            "rank": None if outcome is None else outcome.rank,
            "signal": None if outcome is None else outcome.signal,
            "node": one.node,
            "disrupted": one.disrupted,
            "startedAt": rfc3339_micro(one.started_at),
            "finishedAt": rfc3339_micro(one.finished_at),
            "deletedAt": None if deletion is None else rfc3339_micro(deletion.since),
            "graceSeconds": None if deletion is None else deletion.grace_s,
        }
    )


def _slow_rank(one: SlowRank) -> dict[str, Any]:
    subject = {"type": one.subject, "ranks": list(one.ranks), "worker": one.worker, "node": one.node}
    since = {"attempt": one.since_attempt, "step": one.since_step, "time": one.since_time}
    return {
        "id": one.id,
        "subject": without_none(subject),
        "cause": one.cause,
        "state": one.state,
        "effect": without_none({"secondsPerStep": one.seconds_per_step, "slowdown": one.slowdown}),
        "since": without_none(since),
        "sentence": one.sentence,
    }


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(word.capitalize() for word in tail)
