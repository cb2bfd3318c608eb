"""Features of a cluster that do not follow from its version: providers switch them on and off."""

import asyncio
import logging
from collections.abc import Sequence

from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, InvalidError
from megatronapp_operator.backends.kubernetes.client.resources import (
    KUBERNETES_POD_GROUPS,
    PODS,
    RESOURCE_CLAIMS,
    Object,
    Resource,
)

log = logging.getLogger(__name__)

CONTAINER_RESTARTS = 35
"""Minor version of the servers from which containers may have their own restart policy by default."""
ANSWER_S = 5.0
"""Seconds to wait for an answer; admission webhooks for pods may be slow."""


async def has_container_restarts(api: KubernetesApi, namespace: str) -> bool:
    """Return True if a container may have its own restart policy, by a dry run of creating a pod.

    If the dry run is rejected (a quota, a policy, a missing namespace) or late, the server's version decides.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            made = await api.create(PODS, _pod(namespace), dry_run=True)
    except (ApiError, TimeoutError) as error:
        if isinstance(error, InvalidError) and "restartPolicy" in str(error):  # a policy's refusal is invalid, too
            return False
        log.info(
            "using the server's version to decide whether containers may restart: %s", error or "no answer in time"
        )
        return await _by_version(api)
    return any(container.get("restartPolicy") for container in made["spec"]["containers"])


async def find_pod_groups(api: KubernetesApi) -> Resource | None:
    """Return the newest kind by which the cluster's own scheduler recognises gangs; None if none is served."""
    return await _newest_served(api, KUBERNETES_POD_GROUPS)


async def has_resource_claims(api: KubernetesApi) -> bool:
    """Return True if the cluster has claims of devices (dynamic resource allocation)."""
    return await _newest_served(api, RESOURCE_CLAIMS) is not None


async def _newest_served(api: KubernetesApi, kinds: Sequence[Resource]) -> Resource | None:
    for resource in kinds:
        if resource.plural in await api.served(resource.api_version):
            return resource
    return None


async def _by_version(api: KubernetesApi) -> bool:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await api.minor_version() >= CONTAINER_RESTARTS
    except (ApiError, TimeoutError):  # any client may read it, unless the cluster denies that
        return False


def _pod(namespace: str) -> Object:
    """Return a pod that every pod security standard allows."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    resources = {"requests": {"cpu": "1m", "memory": "1Mi"}, "limits": {"cpu": "1m", "memory": "1Mi"}}
    containers = [
        {"name": name, "image": "none", "resources": resources, "securityContext": security} for name in ("one", "two")
    ]
    containers[1]["restartPolicy"] = "OnFailure"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "megatronapp-capabilities", "namespace": namespace},
        "spec": {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": containers},
    }
