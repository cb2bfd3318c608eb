"""Work of kubelets and schedulers on pods, done by hand on a real API server: placing, starting, ending, removing."""

import dataclasses
import datetime
import json
import time
from collections.abc import Callable
from typing import Any

from megatronapp_common.names import LABEL_JOB
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.resources import PODS, Object

CONFLICT = 409
NOT_OURS = 404, CONFLICT


@dataclasses.dataclass(slots=True)
class FakeNodes:
    """Nodes with capacity for every pod. `api` has all rights; `namespace` is theirs alone."""

    api: KubernetesApi
    namespace: str
    client: Any
    """An httpx.AsyncClient of the same server, for what the operator's client cannot do: binding, status."""
    clock: Callable[[], float] = time.time
    """Seconds since the epoch, as kubelets write them into what they report."""
    address: str = "127.0.0.1"
    """Address of all pods."""
    places: dict[str, str] = dataclasses.field(default_factory=dict)
    """Nodes of pods, by name, that are not to get a separate one."""

    async def pods(self) -> dict[str, Object]:
        """All pods of jobs, by name."""
        listing = await self.api.list_objects(PODS, self.namespace, labels=LABEL_JOB)
        return {pod["metadata"]["name"]: pod for pod in listing.items}

    async def settle(self) -> bool:
        """Start what is created and remove what is to go; whether there was something to do."""
        changed = False
        for pod in (await self.pods()).values():
            if pod["metadata"].get("deletionTimestamp"):
                await self.api.delete(PODS, pod, grace_s=0)
                changed = True
            elif pod["status"]["phase"] == "Pending":
                await self.start(pod)
                changed = True
        return changed

    async def start(self, pod: Object) -> None:
        """Place a pod and start its containers."""
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            await self.bind(name)
        state = {"running": {"startedAt": self.timestamp()}}
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": self.address, "conditions": [ready], **_statuses(pod, state, ready=True)}
        await self._send("PATCH", f"{name}/status", {"status": status})

    async def bind(self, name: str) -> None:
        """Place a pod, on a separate node unless `places` names another."""
        target = {"apiVersion": "v1", "kind": "Node", "name": self.places.get(name, f"node-of-{name}")}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        await self._send("POST", f"{name}/binding", body)

    async def end(self, name: str, code: int, **record: Any) -> None:
        """End a pod's containers with this code; `record` is what its launcher says of it."""
        pod = (await self.pods())[name]
        message = json.dumps({"code": code, "reason": "RankFailed" if code else "Completed", **record})
        now = self.timestamp()
        ended = {"exitCode": code, "startedAt": now, "finishedAt": now, "message": message}
        phase = "Failed" if code else "Succeeded"
        reason = {"reason": "Error" if code else "Completed"}
        status = {"phase": phase, **_statuses(pod, {"terminated": ended | reason}, ready=False)}
        await self._send("PATCH", f"{name}/status", {"status": status})

    def timestamp(self) -> str:
        """The present time, as Kubernetes writes it."""
        now = datetime.datetime.fromtimestamp(self.clock(), datetime.UTC)
        return now.isoformat(timespec="seconds").replace("+00:00", "Z")

    async def _send(self, method: str, path: str, body: Object) -> None:
        headers = {"Content-Type": "application/json" if method == "POST" else "application/merge-patch+json"}
        url = f"{PODS.path(self.namespace)}/{path}"
        while True:
            answer = await self.client.request(method, url, content=json.dumps(body), headers=headers)
            if method == "POST" or answer.status_code != CONFLICT:  # else another write was between
                break
        assert answer.is_success or answer.status_code in NOT_OURS, answer.text


def _statuses(pod: Object, state: Object, *, ready: bool) -> Object:
    return {
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": ready,
                "restartCount": 0,
                "state": state,
            }
            for container in pod["spec"]["containers"]
        ]
    }
