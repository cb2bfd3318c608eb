"""Kinds of objects of the API server, and their paths."""

import dataclasses
from typing import Any
from urllib.parse import quote

from megatronapp_common.job.crd import PLURAL
from megatronapp_common.job.profiles.definition import PLURALS
from megatronapp_common.names import GROUP, VERSION

FIELD_MANAGER = "megatron-operator"
"""Manager of the fields that the operator writes."""
CREATOR = f"{FIELD_MANAGER}-create"
"""Manager of the fields of an object that was created, until it is applied for the first time."""
Object = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Resource:
    """Kind of objects, with its names in paths."""

    api_version: str
    plural: str

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of all objects, those of a namespace, one object, or a part of it."""
        root = "/api" if "/" not in self.api_version else "/apis"
        parts = [root, self.api_version]
        parts += ["namespaces", namespace] if namespace is not None else []
        parts += [part for part in (self.plural, name, subresource) if part is not None]
        return "/".join([parts[0], parts[1], *(quote(part, safe="") for part in parts[2:])])


JOBS = Resource(f"{GROUP}/{VERSION}", PLURAL)
PROFILES = {kind: Resource(f"{GROUP}/{VERSION}", plural) for kind, plural in PLURALS.items()}
PODS = Resource("v1", "pods")
SERVICES = Resource("v1", "services")
SECRETS = Resource("v1", "secrets")
CONFIG_MAPS = Resource("v1", "configmaps")
LEASES = Resource("coordination.k8s.io/v1", "leases")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "networkpolicies")
DISRUPTION_BUDGETS = Resource("policy/v1", "poddisruptionbudgets")
PERSISTENT_VOLUME_CLAIMS = Resource("v1", "persistentvolumeclaims")
VOLCANO_POD_GROUPS = Resource("scheduling.volcano.sh/v1beta1", "podgroups")
COSCHEDULING_POD_GROUPS = Resource("scheduling.x-k8s.io/v1alpha1", "podgroups")
WORKLOADS = Resource("kueue.x-k8s.io/v1beta1", "workloads")
KAI_POD_GROUPS = Resource("scheduling.run.ai/v2alpha2", "podgroups")
KUBERNETES_POD_GROUPS = (
    Resource("scheduling.k8s.io/v1beta1", "podgroups"),  # Kubernetes 1.37
    Resource("scheduling.k8s.io/v1alpha2", "podgroups"),  # 1.36
    Resource("scheduling.k8s.io/v1alpha1", "workloads"),  # 1.35, with the groups of pods in them
)
"""Kinds by which Kubernetes' own scheduler recognises gangs, the newest first; a release serves one of them."""
RESOURCE_CLAIMS = tuple(
    Resource(f"resource.k8s.io/{version}", "resourceclaims") for version in ("v1", "v1beta2", "v1beta1")
)
"""Claims of devices, by dynamic resource allocation, the newest version first."""
NODES = Resource("v1", "nodes")
VERSIONS = Resource("", "version")
EVENTS = Resource("events.k8s.io/v1", "events")
