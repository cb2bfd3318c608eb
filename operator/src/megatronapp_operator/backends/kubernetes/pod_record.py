"""Pods as the operator stores them: only the facts that decisions need. Pure.

A pod of ten kilobytes becomes a record of some hundred bytes; the rest of it is dropped.
"""

import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from megatronapp_common.attempt_order import AttemptOrder
from megatronapp_common.names import (
    ANNOTATION_EXCLUDED_NODES,
    ANNOTATION_RESTART,
    ANNOTATION_SAVE,
    ANNOTATION_TEMPLATE_HASH,
    LABEL_ATTEMPT,
    LABEL_JOB,
    LABEL_JOB_UID,
    LABEL_REPLICA_INDEX,
    LABEL_REPLICA_TYPE,
    LABEL_SPARE,
    ExitCode,
    ReplicaType,
)
from megatronapp_common.save_request import SaveRequest
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.hub import ANNOTATION_STARTS
from megatronapp_operator.backends.kubernetes.render.pod.environment import ANNOTATION_TOPOLOGY
from megatronapp_operator.plan import WorkerOutcome
from megatronapp_operator.plan_io.hub_summary import UNREADABLE

SIGNAL_BASE = 128
"""Exit code minus signal: shells and container runtimes report a signal as 128 + its number."""
DISRUPTIONS = ("DisruptionTarget", "TerminationTarget")
"""Conditions of a pod that is being disrupted: those of Kubernetes, and of Kueue when it evicts a workload."""
DISRUPTING_REASONS = frozenset(
    {"Evicted", "NodeAffinity", "NodeLost", "NodeShutdown", "Preempting", "Preempted", "Terminated"}
)
"""Reasons of a failed pod that are caused by its node or by preemption, not by the pod."""
NODE_LOST = "NodeLost"
MAX_RECORD = 4096
"""Most characters of a termination message that a kubelet keeps."""
TRANSIENT_WAITS = frozenset({"ContainerCreating", "PodInitializing"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContainerState:
    """State of a pod's main container."""

    running: bool = False
    started_at: float | None = None
    finished_at: float | None = None
    outcome: WorkerOutcome | None = None
    waiting: str | None = None
    """Why it does not start, once that is more than preparation."""
    preparing: bool = False
    """True while an init container runs."""
    prepared_at: float | None = None
    """When the last init container ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """Pod of a job. Times are seconds since the epoch."""

    namespace: str
    name: str
    uid: str
    version: int
    """resourceVersion, which Kubernetes promises to be comparable; with older releases etcd makes it so."""
    job: str
    job_uid: str
    type: ReplicaType
    index: int
    attempt: int
    phase: str
    created_at: float
    node: str | None
    address: str | None
    scheduled: bool
    ready: bool
    main: ContainerState
    scheduled_at: float | None = None
    unplaced: str | None = None
    """Message of the scheduler for a pod without a fitting node."""
    avoids: frozenset[str] = frozenset()
    """Nodes that the job excluded when the pod was made."""
    unreachable_since: float | None = None
    """Since when its node has not reported."""
    reachable_since: float | None = None
    """Since when it is ready: its node has reported at least as long."""
    topology: bool = False
    """True once it is annotated with the topology of its node."""
    spare: bool = False
    """True for a spare that waits for the place of a worker."""
    save_request: SaveRequest | None = None
    """Newest request for a checkpoint of its attempt."""
    ends_at_checkpoint: bool = False
    """True if its ranks have the order to end with the next checkpoint of its attempt."""
    end_withdrawn: bool = False
    """True if that order was withdrawn."""
    starts: int = 1
    """For a hub: number of hubs started for this job."""
    template: str = ""
    """Digest of what it was made of; for a hub `render.hub_hash`."""
    agent_problem: str | None = None
    """Why the agent next to a trainer does not run; training continues without it."""
    finalizers: tuple[str, ...] = ()
    """Finalizers of a pod that is being deleted."""
    disrupted: str | None = None
    deleted_at: float | None = None
    """When its deletion was requested."""
    grace_s: float = 0.0

    @property
    def reference(self) -> Object:
        """Minimal object for a delete request."""
        return {"metadata": {"namespace": self.namespace, "name": self.name, "uid": self.uid}}


def seconds(text: str | None) -> float | None:
    """Parse a time of the API to seconds since the epoch; None stays None."""
    return None if text is None else datetime.datetime.fromisoformat(text).timestamp()


def read_pod(pod: Object) -> PodRecord | None:
    """Return the record of a pod; None if labels and owner do not name a job, or it cannot be read.

    Any client that may create pods may choose their labels and write anything into their status.
    """
    try:
        return _read_pod(pod)
    except UNREADABLE:
        return None


def _read_pod(pod: Object) -> PodRecord | None:
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    try:
        kind, index = ReplicaType(labels[LABEL_REPLICA_TYPE]), int(labels.get(LABEL_REPLICA_INDEX, 0))
        job, uid, attempt = labels[LABEL_JOB], labels[LABEL_JOB_UID], int(labels.get(LABEL_ATTEMPT, 0))
    except KeyError:
        return None
    if not any(reference["uid"] == uid for reference in metadata.get("ownerReferences") or ()):
        return None
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    deleted_at, grace_s = _deletion(metadata)
    order = _order(annotations.get(ANNOTATION_RESTART), attempt)
    return PodRecord(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        version=int(metadata["resourceVersion"]),
        job=job,
        job_uid=uid,
        type=kind,
        index=index,
        attempt=attempt,
        phase=status.get("phase", "Pending"),
        created_at=seconds(metadata["creationTimestamp"]) or 0.0,
        node=(pod.get("spec") or {}).get("nodeName"),
        address=status.get("podIP"),
        scheduled=bool((pod.get("spec") or {}).get("nodeName")),
        ready=_is_true(conditions.get("Ready")),
        main=_main(pod, status),
        scheduled_at=_since(conditions.get("PodScheduled"), "True"),
        unplaced=_unplaced(conditions.get("PodScheduled")),
        avoids=frozenset(filter(None, annotations.get(ANNOTATION_EXCLUDED_NODES, "").split(","))),
        unreachable_since=_unreachable_since(status, conditions),
        reachable_since=_since(conditions.get("Ready"), "True"),
        topology=ANNOTATION_TOPOLOGY in annotations,
        spare=labels.get(LABEL_SPARE) == "true",
        save_request=_save_request(annotations.get(ANNOTATION_SAVE), attempt),
        ends_at_checkpoint=order is not None and order.at_checkpoint,
        end_withdrawn=order is not None and order.withdrawn,
        starts=int(annotations.get(ANNOTATION_STARTS, 1)),
        template=sys.intern(annotations.get(ANNOTATION_TEMPLATE_HASH, "")),  # one text for all pods of a gang
        agent_problem=_agent_problem(pod, status) if deleted_at is None else None,
        finalizers=() if deleted_at is None else tuple(metadata.get("finalizers") or ()),
        disrupted=_disrupted(status, conditions),
        deleted_at=deleted_at,
        grace_s=grace_s,
    )


def _save_request(text: str | None, attempt: int) -> SaveRequest | None:
    request = None if text is None else SaveRequest.parse(text)
    return request if request is not None and request.attempt == attempt else None


def _order(text: str | None, attempt: int) -> AttemptOrder | None:
    """Return the order about this attempt; None without one."""
    order = None if text is None else AttemptOrder.parse(text)
    return order if order is not None and order.attempt == attempt else None


def _deletion(metadata: Mapping[str, Any]) -> tuple[float | None, float]:
    """Return when the deletion was requested, and its grace period: the API has the end of the grace period."""
    until, grace_s = seconds(metadata.get("deletionTimestamp")), float(metadata.get("deletionGracePeriodSeconds") or 0)
    return (None, 0.0) if until is None else (until - grace_s, grace_s)


def _is_true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _disrupted(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> str | None:
    for kind in DISRUPTIONS:
        target = conditions.get(kind)
        if target is not None and _is_true(target):
            return str(target.get("reason") or kind)
    reason = str(status.get("reason") or "")
    return reason if reason in DISRUPTING_REASONS else None


def _since(condition: Mapping[str, Any] | None, value: str) -> float | None:
    """Return since when a condition has this value; None: it has another."""
    if condition is None or condition.get("status") != value:
        return None
    return seconds(condition.get("lastTransitionTime"))


def _unplaced(scheduled: Mapping[str, Any] | None) -> str | None:
    if scheduled is None or scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    return str(scheduled.get("message") or "no node fits")


def _unreachable_since(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return since when the pod's node is not ready, as the pod shows it: this needs no right to read nodes.

    A kubelet that reports a pod as not ready for its containers adds a reason. The node controller withdraws `Ready`
    from all pods of a node that does not report, and changes no other condition (kubernetes, pkg/controller/util/node).
    """
    ready, containers = conditions.get("Ready"), conditions.get("ContainersReady")
    taken_back = _is_true(containers) and ready is not None and not ready.get("reason")
    if taken_back or status.get("reason") == NODE_LOST:
        return _since(ready, "False") or _since(ready, "Unknown")
    return None


def _main(pod: Object, status: Mapping[str, Any]) -> ContainerState:
    """Return the state of the first container, which is the main one."""
    name = pod["spec"]["containers"][0]["name"]
    found = next((container for container in status.get("containerStatuses") or () if container["name"] == name), None)
    state = (found or {}).get("state") or {}
    if "terminated" in state:
        return _terminated(state["terminated"])
    if "running" in state:
        return ContainerState(running=True, started_at=seconds(state["running"].get("startedAt")))
    if status.get("phase") in {"Failed", "Succeeded"}:
        return ContainerState(outcome=_without_container(status))
    before = status.get("initContainerStatuses") or ()
    sidecars = _sidecars(pod)
    preparing = [container for container in before if container["name"] not in sidecars]
    return ContainerState(
        waiting=_waiting((*before, *([found] if found else []))),
        preparing=any("running" in (container.get("state") or {}) for container in preparing),
        prepared_at=max((at for container in preparing if (at := _ended_at(container)) is not None), default=None),
    )


def _sidecars(pod: Object) -> set[str]:
    """Return names of init containers that run as long as the pod, such as the proxy of a mesh.

    They prepare nothing.
    """
    containers = pod["spec"].get("initContainers") or ()
    return {container["name"] for container in containers if container.get("restartPolicy") == "Always"}


def _ended_at(container: Mapping[str, Any]) -> float | None:
    return seconds(((container.get("state") or {}).get("terminated") or {}).get("finishedAt"))


def _agent_problem(pod: Object, status: Mapping[str, Any]) -> str | None:
    """Return why a container after the first does not run while the first one does; None if all run."""
    main = pod["spec"]["containers"][0]["name"]
    others = [container for container in status.get("containerStatuses") or () if container["name"] != main]
    if not _main_runs(status, main):
        return None
    for container in others:
        ended = (container.get("state") or {}).get("terminated")
        if ended is not None and ended["exitCode"] != 0:  # a stopped agent may end before its trainer
            message = f": {ended['message'].strip()}" if ended.get("message") else ""
            return f"{container['name']} ended with code {ended['exitCode']}{message}"
    return _waiting(others)


def _main_runs(status: Mapping[str, Any], main: str) -> bool:
    return any(
        container["name"] == main and "running" in (container.get("state") or {})
        for container in status.get("containerStatuses") or ()
    )


def _waiting(statuses: Iterable[Mapping[str, Any]]) -> str | None:
    """Return why the first container that should start does not."""
    for container in statuses:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason and reason not in TRANSIENT_WAITS:
            message = _last_end(container) or waiting.get("message")
            return f"{container['name']}: {reason}" + (f": {message}" if message else "")
    return None


def _last_end(container: Mapping[str, Any]) -> str | None:
    """Describe how a container ended that is to be started again."""
    ended = (container.get("lastState") or {}).get("terminated")
    if ended is None:
        return None
    lines = (ended.get("message") or "").strip().splitlines()
    return f"it ended with code {ended['exitCode']}" + (f": {lines[-1]}" if lines else "")


def _terminated(state: Mapping[str, Any]) -> ContainerState:
    return ContainerState(
        started_at=seconds(state.get("startedAt")),
        finished_at=seconds(state.get("finishedAt")),
        outcome=_outcome(state),
    )


def _outcome(state: Mapping[str, Any]) -> WorkerOutcome:
    """Return the launcher's own record, or what the runtime reports of a container without one."""
    code, reason, text = int(state["exitCode"]), state.get("reason") or "", state.get("message") or ""
    record = _record(text)
    if record is not None and code <= SIGNAL_BASE and reason != "OOMKilled":
        return WorkerOutcome(
            code=code,
            reason=str(record.get("reason") or ""),
            message=str(record.get("message") or ""),
            rank=_number(record.get("rank")),
            signal=_number(record.get("signal")),
        )
    if code > SIGNAL_BASE:
        signal = state.get("signal") or code - SIGNAL_BASE
        why = reason if reason not in {"", "Error"} else "LauncherKilled"
        return WorkerOutcome(code=code, reason=why, message=text or "the launcher died", signal=signal)
    fallback = "Completed" if code == ExitCode.OK else "LauncherFailed"
    return WorkerOutcome(code=code, reason=reason if reason not in {"", "Error"} else fallback, message=text)


def _without_container(status: Mapping[str, Any]) -> WorkerOutcome:
    """Return the outcome of a pod whose main container was never seen: an eviction, a rejection by the kubelet."""
    if status.get("phase") == "Succeeded":
        return WorkerOutcome(code=ExitCode.OK, reason="Completed")
    return _init_failure(status) or WorkerOutcome(
        code=ExitCode.OWN_FAILURE, reason=status.get("reason") or "PodFailed", message=status.get("message") or ""
    )


def _init_failure(status: Mapping[str, Any]) -> WorkerOutcome | None:
    """Return the outcome of a pod whose init container failed; None if none did."""
    for container in status.get("initContainerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended is not None and ended["exitCode"] != 0:
            detail = f": {ended['message'].strip()}" if ended.get("message") else ""
            message = f"init container {container['name']} ended with code {ended['exitCode']}{detail}"
            return WorkerOutcome(code=ExitCode.OWN_FAILURE, reason="InitContainerFailed", message=message)
    return None


def _record(text: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text[:MAX_RECORD])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _number(value: object) -> int | None:
    """Return an integer of a launcher's record if the status can hold it, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None
