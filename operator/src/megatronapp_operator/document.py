"""The plan's status as people and programs see it: camelCase, RFC 3339 times, absent values left out."""

import dataclasses
import datetime
from typing import Any

from megatronapp_operator.plan import Condition, Failure, Status
from megatronapp_operator.plan.observed import Progress, SlowRank


def rfc3339(seconds: float | None) -> str | None:
    """Seconds since the epoch as metav1.Time writes them."""
    if seconds is None:
        return None
    moment = datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)
    return moment.isoformat().replace("+00:00", "Z")


def seconds_of(time: str) -> float:
    """The inverse of `rfc3339`."""
    return datetime.datetime.fromisoformat(time).timestamp()


def status_document(status: Status) -> dict[str, Any]:
    """The `status` of a MegatronJob, without what only the backend knows (sizes, rank table, hub)."""
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
            "startTime": rfc3339(status.start_time),
            "runningTime": rfc3339(status.running_time),
            "lastRestartTime": rfc3339(status.last_restart_time),
            "completionTime": rfc3339(status.completion_time),
            "replicaStatuses": replicas,
            "progress": None if status.progress is None else progress_document(status.progress),
            "slowRanks": [_slow_rank(one) for one in status.slow_ranks],
            "hungRanks": list(status.hung_ranks),
            "failures": [_failure(one) for one in status.failures],
        }
    )


def progress_document(page: Progress) -> dict[str, Any]:
    """A progress page as in the contract; absent values are left out."""
    fields = dataclasses.asdict(page) | {"updated_at": rfc3339(page.updated_at)}
    return without_none({_camel(name): value for name, value in fields.items()})


def without_none(document: dict[str, Any]) -> dict[str, Any]:
    """The document without keys whose value is None."""
    return {key: value for key, value in document.items() if value is not None}


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
    fields = dataclasses.asdict(one) | {"time": rfc3339(one.time), "action": one.action.value}
    return without_none({_camel(name): value for name, value in fields.items()})


def _slow_rank(one: SlowRank) -> dict[str, Any]:
    effect = without_none({"secondsPerStep": one.seconds_per_step, "slowdown": one.slowdown})
    return {
        "id": one.id,
        "subject": {"type": one.subject, "ranks": list(one.ranks)},
        "cause": one.cause,
        "state": one.state,
        "effect": effect,
        "since": without_none({"step": one.since_step}),
        "sentence": one.sentence,
    }


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(word.capitalize() for word in tail)
