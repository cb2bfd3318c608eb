"""Pod groups of gang schedulers, one for each attempt. Kueue creates its object from the pods."""

from collections.abc import Sequence
from typing import Any

from megatronapp_common.names import GROUP, KIND
from megatronapp_operator.backends.kubernetes.client.resources import (
    COSCHEDULING_POD_GROUPS,
    KAI_POD_GROUPS,
    KUBERNETES_POD_GROUPS,
    VOLCANO_POD_GROUPS,
    Object,
    Resource,
)
from megatronapp_operator.backends.kubernetes.render.objects import labels, make, metadata
from megatronapp_operator.backends.kubernetes.render.pod.quantities import gang_requests
from megatronapp_operator.backends.kubernetes.render.pod.scheduling import KUBERNETES, WORKERS
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import WorkerDraft
from megatronapp_operator.backends.kubernetes.render.settings import Rendered, RenderSettings

GROUPS: dict[str, Resource] = {
    "Volcano": VOLCANO_POD_GROUPS,
    "Coscheduling": COSCHEDULING_POD_GROUPS,
    "KAI": KAI_POD_GROUPS,
}
"""Kinds of pod groups of all schedulers but Kubernetes' own, whose kind depends on the cluster."""


def group_resource(gang: str, settings: RenderSettings) -> Resource | None:
    """Return the kind of the pod groups that the operator creates for this scheduler; None if it creates none."""
    return settings.pod_groups if gang == KUBERNETES else GROUPS.get(gang)


def kubernetes_group(draft: WorkerDraft, resource: Resource, pod: Object) -> Rendered:
    """Return the group for Kubernetes' own scheduler: all workers start together, and only all may be preempted.

    `pod` is the spec of a worker, whose priority may be that of the template.
    """
    meta = metadata(draft.owner, draft.names.group(draft.attempt.number), labels(draft.owner, "worker"))
    policy = {"gang": {"minCount": draft.world.nodes}}
    if resource.plural == "workloads":
        controller = {"apiGroup": GROUP, "kind": KIND, "name": draft.owner.name}
        spec: Object = {"controllerRef": controller, "podGroups": [{"name": WORKERS, "policy": policy}]}
        return resource, make(resource.api_version, "Workload", meta, spec=spec)
    spec = {"schedulingPolicy": policy}
    if resource == KUBERNETES_POD_GROUPS[0]:  # before 1.37 these two need a feature gate of their own
        spec |= _without_none({"priorityClassName": pod.get("priorityClassName"), "disruptionMode": {"all": {}}})
    return resource, make(resource.api_version, "PodGroup", meta, spec=spec)


def pod_group(draft: WorkerDraft, resource: Resource, pods: Sequence[tuple[Object, int]]) -> Rendered:
    """Return the pod group; `pods` are the specs that must start together, each with its count."""
    spec = _without_none(
        {
            "minMember": draft.world.nodes,
            "queue": None if resource is COSCHEDULING_POD_GROUPS else draft.spec.scheduling.queue,
            "minResources": None if resource is KAI_POD_GROUPS else gang_requests(pods),
            "priorityClassName": None if resource is COSCHEDULING_POD_GROUPS else draft.spec.priority_class_name,
            "scheduleTimeoutSeconds": (
                draft.spec.scheduling.timeout_seconds if resource is COSCHEDULING_POD_GROUPS else None
            ),
        }
    )
    meta = metadata(draft.owner, draft.names.group(draft.attempt.number), labels(draft.owner, "worker"))
    return resource, make(resource.api_version, "PodGroup", meta, spec=spec)


def _without_none(values: dict[str, Any]) -> Object:
    return {name: value for name, value in values.items() if value is not None}
