"""Settings for rendering besides the job."""

import dataclasses
from collections.abc import Mapping

from megatronapp_operator.backends.kubernetes.client.resources import Object, Resource

Rendered = tuple[Resource, Object]
"""Object and its resource."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenderSettings:
    """Settings of an installation of the operator; the same for all jobs."""

    trainer_image: str
    """Image of jobs that have none."""
    analyzer_image: str
    """Image of agent and hub for jobs that have none."""
    image_pull_policy: str = "IfNotPresent"
    """Pull policy of the two images above; an image of a job has the job's policy."""
    cluster_domain: str = "cluster.local"
    operator_namespace: str
    """Namespace of operator and gateway."""
    operator_labels: Mapping[str, str]
    gateway_labels: Mapping[str, str]
    prometheus_namespace: str | None = None
    """Namespace of the Prometheus that may scrape hubs; None: no Prometheus may."""
    prometheus_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Labels of its pods; empty: every pod of that namespace."""
    node_access: bool = False
    """True if the operator may read nodes, and so gives workers their topology (`ANNOTATION_TOPOLOGY`)."""
    key_id: str = ""
    """Id of the key from which the secret of the job is derived; empty: of a release that had one key only."""
    container_restarts: bool = False
    """True if containers may have their own restart policy (Kubernetes 1.35 and newer)."""
    pod_groups: Resource | None = None
    """Kind by which the cluster's own scheduler recognises gangs (`scheduling.gang: Kubernetes`); None: by none."""
    resource_claims: bool = False
    """True if pods may claim devices (dynamic resource allocation, Kubernetes 1.34 and newer)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobOwner:
    """MegatronJob that owns all objects."""

    namespace: str
    name: str
    uid: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSettings:
    """Settings of one life of the gang."""

    number: int
    excluded_nodes: tuple[str, ...] = ()
    """Names of nodes on which no worker of this attempt may run."""
    first: str | None = None
    """Name of the pod of worker 0, if it was a spare."""
