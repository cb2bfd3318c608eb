"""What rendering needs to know besides the job."""

import dataclasses
from collections.abc import Mapping

from megatronapp_operator.backends.kubernetes.client.api import Object, Resource

Rendered = tuple[Resource, Object]
"""An object, and where it belongs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenderSettings:
    """What an installation of the operator chose; the same for all jobs."""

    trainer_image: str
    """Of jobs that name none."""
    analyzer_image: str
    """Of agent and hub, where a job names none."""
    image_pull_policy: str = "IfNotPresent"
    """Of the two images above; an image that the job names goes by the job's own policy."""
    cluster_domain: str = "cluster.local"
    operator_namespace: str
    """Of operator and door."""
    operator_labels: Mapping[str, str]
    gateway_labels: Mapping[str, str]
    prometheus_namespace: str | None = None
    """None: hubs let no Prometheus in."""
    prometheus_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Empty: every pod of that namespace."""
    node_access: bool = False
    """Whether the operator may read nodes, and so tells workers their topology (`ANNOTATION_TOPOLOGY`)."""
    key_id: str = ""
    """Of the key from which the secret of the job is derived; empty: of a release that had one key only."""
    container_restarts: bool = False
    """Whether a container may have a restart policy of its own (Kubernetes 1.35 and newer)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobOwner:
    """The MegatronJob that owns all objects."""

    namespace: str
    name: str
    uid: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSettings:
    """One life of the gang."""

    number: int
    excluded_nodes: tuple[str, ...] = ()
    """Names of nodes that no worker of this attempt may go to."""
