"""Network policies for incoming connections of a job's pods. Outgoing connections are not limited.

A policy applies to the cluster's own network: neither to pods in their node's network nor to attached networks and
RDMA, which bypass it.
"""

from collections.abc import Mapping, Sequence

from megatronapp_common.job import MegatronJob
from megatronapp_common.names import HUB_PORT, SERVE_PORT, STATUS_PORT, ReplicaType
from megatronapp_operator.backends.kubernetes.client.resources import NETWORK_POLICIES, Object
from megatronapp_operator.backends.kubernetes.render.objects import ObjectNames, labels, make, metadata, selector
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner, Rendered, RenderSettings

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that the API server sets on every namespace."""

_NAMESPACE_OF_THE_JOB: Object = {"podSelector": {}}
"""All pods of the namespace, with the hub."""


def workers_policy(job: MegatronJob, owner: JobOwner, settings: RenderSettings) -> Rendered | None:
    """Return the policy of workers, or None if the job has none.

    Workers accept each other, the operator at the launcher's status, and for a served model its namespace and gateway.
    """
    if job.spec.network.policy == "None":
        return None
    rules = [_rule([{"podSelector": selector(owner, ReplicaType.WORKER)}])]
    rules += _rules(_operator(settings), STATUS_PORT)
    if job.spec.mode == "serve":
        rules += _rules([_NAMESPACE_OF_THE_JOB, *_gateway(settings)], SERVE_PORT)
    return _policy(owner, ObjectNames(owner.name).workers, ReplicaType.WORKER, rules)


def init_policy(job: MegatronJob, owner: JobOwner) -> Rendered | None:
    """Return the policy of the initializers that run once: no incoming connections."""
    if job.spec.network.policy == "None" or all(given.scope != "Job" for given in job.spec.initializers):
        return None
    return _policy(owner, ObjectNames(owner.name).init, ReplicaType.INIT, [])


def hub_policy(job: MegatronJob, owner: JobOwner, settings: RenderSettings) -> Rendered | None:
    """Return the policy of the hub: agents, operator, gateway and Prometheus may connect to its one port."""
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
    """Return one rule, or none without peers: a rule without peers would admit all pods."""
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
    """Return a peer for pods by namespace and labels; none without labels, since an empty selector matches all pods."""
    if not chosen:
        return []
    return [{"namespaceSelector": _namespace(namespace), "podSelector": {"matchLabels": dict(chosen)}}]


def _namespace(name: str) -> Object:
    return {"matchLabels": {NAMESPACE_NAME: name}}
