"""Who may open connections to a job's pods. Nothing is said about where these may connect to.

A policy holds for the cluster's own network: neither for pods in their node's network nor for attached networks and
RDMA, which go past it.
"""

from collections.abc import Mapping, Sequence

from megatronapp_common.job import MegatronJob
from megatronapp_common.names import HUB_PORT, SERVE_PORT, STATUS_PORT, ReplicaType
from megatronapp_operator.backends.kubernetes.client.api import NETWORK_POLICIES, Object
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames, labels, make, metadata, selector
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner, Rendered, RenderSettings

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""The API server sets it on every namespace."""

_NAMESPACE_OF_THE_JOB: Object = {"podSelector": {}}
"""All its pods, the hub among them."""


def workers_policy(job: MegatronJob, owner: JobOwner, settings: RenderSettings) -> Rendered | None:
    """Workers let each other in, and the operator to the launcher's status; a served model, whoever may ask it."""
    if job.spec.network.policy == "None":
        return None
    rules = [_rule([{"podSelector": selector(owner, ReplicaType.WORKER)}])]
    rules += _rules(_operator(settings), STATUS_PORT)
    if job.spec.mode == "serve":
        rules += _rules([_NAMESPACE_OF_THE_JOB, *_gateway(settings)], SERVE_PORT)
    return _policy(owner, ObjectNames(owner.name).workers, ReplicaType.WORKER, rules)


def init_policy(job: MegatronJob, owner: JobOwner) -> Rendered | None:
    """The initializers that run once let nobody in."""
    if job.spec.network.policy == "None" or all(one.scope != "Job" for one in job.spec.initializers):
        return None
    return _policy(owner, ObjectNames(owner.name).init, ReplicaType.INIT, [])


def hub_policy(job: MegatronJob, owner: JobOwner, settings: RenderSettings) -> Rendered | None:
    """The hub lets agents, operator, door and Prometheus in, at its one port."""
    if job.spec.network.policy == "None":
        return None
    agents: list[Object] = [{"podSelector": selector(owner, ReplicaType.WORKER)}]
    rules = _rules([*agents, *_operator(settings), *_gateway(settings), *_prometheus(settings)], HUB_PORT)
    return _policy(owner, ObjectNames(owner.name).hub, ReplicaType.HUB, rules)


def _policy(owner: JobOwner, name: str, kind: ReplicaType, rules: Sequence[Object]) -> Rendered:
    spec = {"podSelector": selector(owner, kind), "policyTypes": ["Ingress"], "ingress": list(rules)}
    meta = metadata(owner, name, labels(owner, kind.value))
    return NETWORK_POLICIES, make(NETWORK_POLICIES.api_version, "NetworkPolicy", meta, spec=spec)


def _rules(peers: Sequence[Object], port: int) -> list[Object]:
    """No rule without peers: one would let everybody in."""
    return [_rule(peers) | {"ports": [{"protocol": "TCP", "port": port}]}] if peers else []


def _rule(peers: Sequence[Object]) -> Object:
    return {"from": list(peers)}


def _operator(settings: RenderSettings) -> list[Object]:
    return _pods_of(settings.operator_namespace, settings.operator_labels)


def _gateway(settings: RenderSettings) -> list[Object]:
    return _pods_of(settings.operator_namespace, settings.gateway_labels)


def _prometheus(settings: RenderSettings) -> list[Object]:
    if settings.prometheus_namespace is None:
        return []
    if not settings.prometheus_labels:
        return [{"namespaceSelector": _namespace(settings.prometheus_namespace)}]
    return _pods_of(settings.prometheus_namespace, settings.prometheus_labels)


def _pods_of(namespace: str, chosen: Mapping[str, str]) -> list[Object]:
    """Pods by namespace and labels. Without labels none: a selector that says nothing means all of them."""
    if not chosen:
        return []
    return [{"namespaceSelector": _namespace(namespace), "podSelector": {"matchLabels": dict(chosen)}}]


def _namespace(name: str) -> Object:
    return {"matchLabels": {NAMESPACE_NAME: name}}
