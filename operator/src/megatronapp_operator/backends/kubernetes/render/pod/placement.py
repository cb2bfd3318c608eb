"""Scheduling constraints of a worker's pod."""

from collections.abc import Iterable
from typing import Any

from megatronapp_common.job import Spec
from megatronapp_common.job.api.cluster import GPU_CLAIMS
from megatronapp_common.names import ReplicaType
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.render.objects import selector
from megatronapp_operator.backends.kubernetes.render.pod.network import LABEL_HOST_NETWORK
from megatronapp_operator.backends.kubernetes.render.pod.worker_draft import WorkerDraft

HOST_NAME = "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def tolerations(spec: Spec, gpus: int) -> list[Object]:
    """Return the tolerations of the user, and of the taint that keeps other pods off nodes with GPUs.

    The taint has the name of the resource, which claimed GPUs do not have.
    """
    given = [toleration.to_dict() for toleration in spec.tolerations]
    gpu = {"key": spec.gpu_resource_name, "operator": "Exists", "effect": "NoSchedule"}
    counted = gpus > 0 and spec.gpu_resource_name != GPU_CLAIMS
    return [*given, gpu] if counted and gpu not in given else given


def with_placement(spec: Object, draft: WorkerDraft) -> Object:
    """Return the pod's spec with the affinity that its worker needs, besides that of user and template."""
    affinity: dict[str, Any] = dict(spec.get("affinity") or {})
    if draft.attempt.excluded_nodes:
        affinity["nodeAffinity"] = without_nodes(affinity.get("nodeAffinity") or {}, draft.attempt.excluded_nodes)
    if draft.host_network:
        affinity["podAntiAffinity"] = _with(affinity.get("podAntiAffinity"), REQUIRED, _alone_on_its_node())
    topology = draft.spec.scheduling.topology
    if topology is not None and draft.spec.scheduling.gang != "Kueue":
        term = {"labelSelector": selector(draft.owner, ReplicaType.WORKER), "topologyKey": topology.level}
        kind, entry = (REQUIRED, term) if topology.required else (PREFERRED, {"weight": 100, "podAffinityTerm": term})
        affinity["podAffinity"] = _with(affinity.get("podAffinity"), kind, entry)
    return spec | {"affinity": affinity} if affinity else spec


def without_nodes(affinity: Object, nodes: Iterable[str]) -> Object:
    """Return a node affinity that also excludes nodes.

    Nodes are excluded by name and not by the label of the host name, which a cluster may set to another value. A field
    takes one value, so each node is a separate requirement. Terms are alternatives: each of them must have the
    requirements. An empty term matches no node and stays empty.
    """
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    required = affinity.get(REQUIRED) or {}
    terms = required.get("nodeSelectorTerms") or [{"matchFields": []}]
    restricted = [
        term | {"matchFields": [*(term.get("matchFields") or ()), *fields]} if term else term for term in terms
    ]
    return affinity | {REQUIRED: required | {"nodeSelectorTerms": restricted}}


def _alone_on_its_node() -> Object:
    """Return a term for one worker with the node's network per node, over all namespaces.

    The ports of such workers are the node's.
    """
    return {
        "labelSelector": {"matchLabels": {LABEL_HOST_NETWORK: "true"}},
        "namespaceSelector": {},
        "topologyKey": HOST_NAME,
    }


def _with(affinity: Object | None, kind: str, entry: Object) -> Object:
    given = affinity or {}
    return given | {kind: [*(given.get(kind) or ()), entry]}
