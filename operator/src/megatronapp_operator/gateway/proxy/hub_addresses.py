"""Where the hub of a job listens: told by the cluster, never by the hub, by its job's status or by a client.

The address is that of the pod, which only its kubelet writes. Names would be answered by whoever may write a Service,
and the endpoints of a Service by whoever may write those. The pod must belong to this life of the job: its controller
is the MegatronJob with this very uid.
"""

import ipaddress

from megatronapp_common.names import HUB_PORT, KIND
from megatronapp_operator.backends.kubernetes.client.api import PODS, KubernetesApi, Object
from megatronapp_operator.gateway.job_catalog import CatalogJob
from megatronapp_operator.gateway.problems import GatewayError
from megatronapp_operator.gateway.ttl_cache import TtlCache

FRESH_S = 2.0
HINT = "It needs spec.analyzer.enabled: true, starts with the job, and ends spec.analyzer.retainSeconds after it."


class HubAddresses:
    """Looks hubs up."""

    def __init__(self, api: KubernetesApi, *, port: int = HUB_PORT) -> None:
        self._api = api
        self._port = port
        self._pods = TtlCache(self._get, ttl_s=FRESH_S)

    async def address(self, job: CatalogJob) -> str:
        """`host:port` of the job's hub. Raises Refusal (503) if there is none now; ApiError."""
        pod = await self._pods.get((job.namespace, f"{job.name}-hub"))
        if pod is None or not is_owned_by(pod, job.uid):
            raise GatewayError(503, "no-hub", f"{job.namespace}/{job.name} has no hub now", HINT)
        if pod["metadata"].get("deletionTimestamp"):  # soon its address may be another pod's
            raise GatewayError(503, "no-hub", f"the hub of {job.namespace}/{job.name} is ending", HINT)
        status = pod.get("status", {})
        if status.get("phase") != "Running" or not status.get("podIP"):
            phase = status.get("phase", "Pending")
            raise GatewayError(503, "no-hub", f"the hub of {job.namespace}/{job.name} is {phase}, not Running", HINT)
        return join(status["podIP"], self._port)

    async def _get(self, key: tuple[str, str]) -> Object | None:
        return await self._api.get(PODS, *key)


def is_owned_by(obj: Object, uid: str) -> bool:
    """Whether the MegatronJob with this uid controls the object."""
    owners = obj["metadata"].get("ownerReferences", ())
    return any(one.get("controller") and one["kind"] == KIND and one["uid"] == uid for one in owners)


def join(address: str, port: int) -> str:
    """An address and a port as they stand in a URL."""
    bare = ipaddress.ip_address(address)
    return f"[{bare}]:{port}" if bare.version == 6 else f"{bare}:{port}"
