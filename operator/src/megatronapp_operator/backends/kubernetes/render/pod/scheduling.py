"""Scheduler of a pod, and labels and annotations by which it recognises the gang."""

from megatronapp_common.names import LABEL_REPLICA_INDEX
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import WorkerDraft

SCHEDULERS = {"Volcano": "volcano", "Coscheduling": "scheduler-plugins-scheduler", "KAI": "kai-scheduler"}
"""Names under which these schedulers are installed, unless the job has another."""
KUBERNETES = "Kubernetes"
WORKERS = "workers"
"""Name of the only group of pods in a Workload."""


def scheduler_name(draft: WorkerDraft) -> str | None:
    """Return the scheduler of the job; if it has none, that of the gang."""
    return draft.spec.scheduler_name or SCHEDULERS.get(draft.spec.scheduling.gang)


def pod_marks(draft: WorkerDraft) -> tuple[dict[str, str], dict[str, str]]:
    """Return labels and annotations by which a scheduler recognises the gang of a pod."""
    group = draft.names.group(draft.attempt.number)
    queue = draft.spec.scheduling.queue
    match draft.spec.scheduling.gang:
        case "Kueue":
            return _kueue(draft, group, queue or "")
        case "Volcano":
            return {}, {"scheduling.k8s.io/group-name": group}
        case "Coscheduling":
            return {"scheduling.x-k8s.io/pod-group": group}, {}
        case "KAI":
            marks = {"pod-group-name": group, "kai.scheduler/skip-podgrouper": "true"}
            return ({"kai.scheduler/queue": queue} if queue else {}), marks
        case _:
            return {}, {}


def _kueue(draft: WorkerDraft, group: str, queue: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the marks of a group of plain pods.

    The name of the group has the attempt: other excluded nodes make another shape of pods.

    Kueue waits for replacements of failed pods unless an annotation says that none will follow.
    """
    topology = draft.spec.scheduling.topology
    annotations = {
        "kueue.x-k8s.io/pod-group-total-count": str(draft.world.nodes),
        "kueue.x-k8s.io/retriable-in-group": "false",
        "kueue.x-k8s.io/pod-group-pod-index-label": LABEL_REPLICA_INDEX,
    }
    if topology is not None:
        kind = "required" if topology.required else "preferred"
        annotations[f"kueue.x-k8s.io/podset-{kind}-topology"] = topology.level
    return {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/pod-group-name": group}, annotations


def group_reference(draft: WorkerDraft) -> Object:
    """Return the field of a pod that names its group to Kubernetes' own scheduler."""
    resource = draft.settings.pod_groups
    if draft.spec.scheduling.gang != KUBERNETES or resource is None:
        return {}
    name = draft.names.group(draft.attempt.number)
    if resource.plural == "workloads":
        return {"workloadRef": {"name": name, "podGroup": WORKERS}}
    return {"schedulingGroup": {"podGroupName": name}}
