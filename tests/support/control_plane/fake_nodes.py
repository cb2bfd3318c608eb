"""Work of kubelets and schedulers on pods, done by hand on a real API server: placing, starting, ending, removing."""

import dataclasses
import datetime
import json
from typing import Any

from megatronapp_common.names import LABEL_JOB
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi
from megatronapp_operator.backends.kubernetes.client.resources import PODS, Object

NOT_OURS = 404, 409


@dataclasses.dataclass(slots=True)
class FakeNodes:
    """Nodes with capacity for every pod. `api` has all rights; `namespace` is theirs alone."""

    api: KubernetesApi
    namespace: str
    client: Any
    """An httpx.AsyncClient of the same server, for what the operator's client cannot do: binding, status."""

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
        """Place a pod on a separate node and start its containers."""
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            await self.bind(name)
        state = {"running": {"startedAt": _now()}}
        ready = {"type": "Ready", "status": "True"}
        status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [ready], **_statuses(pod, state, ready=True)}
        await self._send("PATCH", f"{name}/status", {"status": status})

    async def bind(self, name: str) -> None:
        """Place a pod on a separate node."""
        target = {"apiVersion": "v1", "kind": "Node", "name": f"node-of-{name}"}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        await self._send("POST", f"{name}/binding", body)

    async def end(self, name: str, code: int, **record: Any) -> None:
        """End a pod's containers with this code; `record` is what its launcher says of it."""
        pod = (await self.pods())[name]
        message = json.dumps({"code": code, "reason": "RankFailed" if code else "Completed", **record})
        ended = {"exitCode": code, "startedAt": _now(), "finishedAt": _now(), "message": message}
        phase = "Failed" if code else "Succeeded"
        reason = {"reason": "Error" if code else "Completed"}
        status = {"phase": phase, **_statuses(pod, {"terminated": ended | reason}, ready=False)}
        await self._send("PATCH", f"{name}/status", {"status": status})

    async def _send(self, method: str, path: str, body: Object) -> None:
        headers = {"Content-Type": "application/json" if method == "POST" else "application/merge-patch+json"}
        url = f"{PODS.path(self.namespace)}/{path}"
        answer = await self.client.request(method, url, content=json.dumps(body), headers=headers)
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


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
