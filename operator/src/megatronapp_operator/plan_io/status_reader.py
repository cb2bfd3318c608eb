"""The plan's status from the `status` of a MegatronJob: the inverse of `status_document.status_document`.

No status is rejected. It may be empty, of an older release, or edited; what cannot be read is treated as absent,
because an operator that stops at a status can never repair it.
"""

from collections.abc import Mapping
from typing import Any

from megatronapp_operator.plan import (
    TERMINAL_PHASES,
    Condition,
    ConditionType,
    Deletion,
    ExcludedNode,
    Failure,
    FailureAction,
    Phase,
    Replicas,
    SlowRank,
    Status,
    Worker,
    WorkerOutcome,
    WorkerPhase,
)
from megatronapp_operator.plan_io.hub_summary import read_progress
from megatronapp_operator.plan_io.status_fields import FieldReader, numbers_of

_ENDS = {
    ConditionType.COMPLETE: Phase.SUCCEEDED,
    ConditionType.FAILED: Phase.FAILED,
    ConditionType.SUSPENDED: Phase.SUSPENDED,
}
"""Phases that a true condition proves; the first match is taken."""


def read_status(document: Mapping[str, Any] | None) -> Status:
    """Parse the status that the last plan gave, as far as the document holds it."""
    fields = FieldReader(document or {})
    conditions = fields.items("conditions", _condition)
    phase, attempt = _phase(fields, conditions), fields.count("attempt")
    return Status(
        phase=phase,
        conditions=conditions,
        generation=fields.count("observedGeneration"),
        attempt=attempt,
        restarts=fields.count("restarts"),
        restarts_towards_max=fields.count("restartsTowardsMax"),
        start_time=fields.time("startTime"),
        attempt_time=fields.time("attemptTime"),
        holding_time=fields.time("holdingTime"),
        unplaced_time=fields.time("unplacedTime"),
        scheduled_time=fields.time("scheduledTime"),
        running_time=fields.time("runningTime"),
        groups=fields.optional_numbers("podGroups"),
        active_s=max(0.0, fields.real("activeSeconds") or 0.0),
        last_restart_time=fields.time("lastRestartTime"),
        completion_time=_completion_time(fields, phase, conditions),
        released=fields.count("released"),
        released_time=fields.time("releasedTime"),
        denied_time=fields.time("deniedTime"),
        initialized=fields.flag("initialized"),
        init_restarts=fields.count("initRestarts"),
        init_clearing=fields.flag("initClearing"),
        init_failed_time=fields.time("initFailedTime"),
        excluded_nodes=fields.items("excludedNodes", _excluded),
        tolerated_nodes=fields.items("toleratedNodes", _excluded),
        rank_zero=fields.number("rankZeroWorker"),
        succeeded=numbers_of(fields.text("succeededWorkers")),
        ended=fields.items("endedWorkers", lambda one: _ended(one, attempt)),
        progress=fields.read("progress", read_progress),
        progress_time=fields.time("progressTime"),
        slow_ranks=fields.items("slowRanks", _slow_rank),
        slow_node=fields.optional_text("slowNode"),
        hung_ranks=fields.numbers("hungRanks"),
        last_control=fields.number("lastControl"),
        replicas=_replicas(fields.block("replicaStatuses")),
        failures=fields.items("failures", _failure),
    )


def _phase(fields: FieldReader, conditions: tuple[Condition, ...]) -> Phase:
    """Return the phase, by conditions if the job has ended: the field `phase` is only a summary for users."""
    true = {one.type for one in conditions if one.status}
    ended = next((phase for kind, phase in _ENDS.items() if kind in true), None)
    told = fields.choice("phase", Phase)
    return ended or (Phase.PENDING if told is None else told)


def _completion_time(fields: FieldReader, phase: Phase, conditions: tuple[Condition, ...]) -> float | None:
    """Return when the job ended. If that is missing from the status of an ended job, its condition or 0 is used."""
    told = fields.time("completionTime")
    if told is not None or phase not in TERMINAL_PHASES:
        return told
    return next((one.since for one in conditions if _ENDS.get(one.type) is phase), 0.0)


def _condition(fields: FieldReader) -> Condition | None:
    kind = fields.choice("type", ConditionType)
    if kind is None:
        return None
    return Condition(
        type=kind,
        status=fields.text("status") == "True",
        reason=fields.text("reason"),
        message=fields.text("message"),
        since=fields.time("lastTransitionTime") or 0.0,
        generation=fields.count("observedGeneration"),
    )


def _replicas(fields: FieldReader) -> Replicas:
    return Replicas(
        desired=fields.count("desired"),
        pending=fields.count("pending"),
        running=fields.count("running"),
        succeeded=fields.count("succeeded"),
        failed=fields.count("failed"),
    )


def _failure(fields: FieldReader) -> Failure | None:
    time, action = fields.time("time"), fields.choice("action", FailureAction)
    if time is None or action is None:
        return None
    return Failure(
        time=time,
        attempt=fields.count("attempt"),
        reason=fields.text("reason"),
        message=fields.text("message"),
        action=action,
        worker=fields.number("worker"),
        node=fields.optional_text("node"),
        rank=fields.number("rank"),
        exit_code=fields.number("exitCode"),
        signal=fields.number("signal"),
    )


def _excluded(fields: FieldReader) -> ExcludedNode | None:
    node, until = fields.optional_text("node"), fields.time("until")
    return None if node is None or until is None else ExcludedNode(node=node, reason=fields.text("reason"), until=until)


def _ended(fields: FieldReader, attempt: int) -> Worker | None:
    index, code = fields.number("index"), fields.number("exitCode")
    if index is None:
        return None
    return Worker(
        index=index,
        attempt=attempt,
        phase=WorkerPhase.FAILED,
        node=fields.optional_text("node"),
        disrupted=fields.optional_text("disrupted"),
        started_at=fields.time("startedAt"),
        finished_at=fields.time("finishedAt"),
        outcome=None if code is None else _outcome(fields, code),
        deletion=_deletion(fields),
    )


def _outcome(fields: FieldReader, code: int) -> WorkerOutcome:
    return WorkerOutcome(
        code=code,
        reason=fields.text("reason"),
        message=fields.text("message"),
        rank=fields.number("rank"),
        signal=fields.number("signal"),
    )


def _deletion(fields: FieldReader) -> Deletion | None:
    since = fields.time("deletedAt")
    return None if since is None else Deletion(since=since, grace_s=fields.real("graceSeconds") or 0.0)


def _slow_rank(fields: FieldReader) -> SlowRank | None:
    if not fields.text("id"):
        return None
    subject, effect, since = fields.block("subject"), fields.block("effect"), fields.block("since")
    return SlowRank(
        id=fields.text("id"),
        subject=subject.text("type"),
        ranks=subject.numbers("ranks"),
        worker=subject.number("worker"),
        node=subject.optional_text("node"),
        cause=fields.text("cause"),
        state=fields.text("state"),
        sentence=fields.text("sentence"),
        since_attempt=since.number("attempt"),
        since_step=since.number("step"),
        since_time=since.real("time"),
        slowdown=effect.real("slowdown"),
        seconds_per_step=effect.real("secondsPerStep"),
    )
