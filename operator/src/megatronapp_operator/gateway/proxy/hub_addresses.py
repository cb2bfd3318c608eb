"""Addresses of the hubs of jobs, from the cluster; never from the hub, its job's status or a client.

The address is that of the pod, which only its kubelet writes: all who may write a Service or its endpoints could answer
for its name. The pod must belong to this life of the job: its controller is the MegatronJob with this very uid.
"""

import ipaddress
import socket

from megatronapp_common.names import HUB_PORT, KIND
from megatronapp_common.web.loopback import authority
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.server import KERNEL_BYTES
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.resources import PODS, Object
from megatronapp_operator.gateway.job_catalog import CatalogJob
from megatronapp_operator.gateway.ttl_cache import TtlCache

FRESH_S = 2.0
HINT = "It needs spec.analyzer.enabled: true, starts with the job, and ends spec.analyzer.retainSeconds after it."


class HubAddresses:
    """Finds the addresses of hubs."""

    def __init__(self, api: KubernetesApi, *, port: int = HUB_PORT) -> None:
        self._api = api
        self._port = port
        self._pods = TtlCache(self._get, ttl_s=FRESH_S)

    async def address(self, job: CatalogJob) -> str:
        """Return `host:port` of the job's hub. Raises HttpError (503) while the job has no hub; ApiError."""
        pod = await self._pods.get((job.namespace, f"{job.name}-hub"))
        if pod is None or not is_owned_by(pod, job.uid):
            raise HttpError(503, "no-hub", f"{job.namespace}/{job.name} has no hub now", HINT)
        if pod["metadata"].get("deletionTimestamp"):  # soon its address may be another pod's
            raise HttpError(503, "no-hub", f"the hub of {job.namespace}/{job.name} is ending", HINT)
        status = pod.get("status", {})
        if status.get("phase") != "Running" or not status.get("podIP"):
            phase = status.get("phase", "Pending")
            raise HttpError(503, "no-hub", f"the hub of {job.namespace}/{job.name} is {phase}, not Running", HINT)
        return authority(str(ipaddress.ip_address(status["podIP"])), self._port)

    async def _get(self, key: tuple[str, str]) -> Object | None:
        return await self._api.get(PODS, *key)


def is_owned_by(obj: Object, uid: str) -> bool:
    """Return True if the MegatronJob with this uid controls the object."""
    owners = obj["metadata"].get("ownerReferences", ())
    return any(owner.get("controller") and owner["kind"] == KIND and owner["uid"] == uid for owner in owners)


def hub_socket(family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
    """Return a socket for a connection to a hub, which may send more than is read."""
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    made.setblocking(False)
    return made
