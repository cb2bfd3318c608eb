"""Pods of jobs on a real API server next to a real operator process, and the launchers that it queries over HTTP."""

import contextlib
import dataclasses
import http.server
import json
import threading
from collections.abc import AsyncIterator, Iterator

import httpx
import kube
from fake_nodes import FakeNodes
from operator_simulation import KEY
from ports import own_addresses

from megatronapp_common.names import LABEL_JOB, STATUS_PORT
from megatronapp_common.web.tokens import TokenRole, derive_token, job_secret
from megatronapp_operator.backends.kubernetes.client.api import connect
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_trainer.launch.rendezvous.gang_status import GangPhase, GangStatus

ADDRESSES = own_addresses()


@dataclasses.dataclass(slots=True)
class Launcher:
    """Answer of worker 0 of a job: its status to the viewer's token, 401 to others."""

    uid: str
    address: str
    status: GangStatus
    refused: int = 0

    def train(self, attempt: int, iteration: int = 1) -> None:
        """The ranks of an attempt train."""
        status = GangStatus(attempt)
        status.phase = GangPhase.RUNNING
        status.progress = {"attempt": attempt, "iteration": iteration, "totalIterations": 1000, "state": "training"}
        self.status = status


@contextlib.contextmanager
def launcher(uid: str) -> Iterator[Launcher]:
    """Serve as the launcher of a job's worker 0, at a separate address."""
    made = Launcher(uid, next(ADDRESSES), GangStatus(0))
    good = f"Bearer {derive_token(job_secret(KEY, uid), TokenRole.VIEWER)}"

    class StatusHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == good
            made.refused += not known
            body = json.dumps(made.status.document()).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Write no log lines."""

    with http.server.ThreadingHTTPServer((made.address, STATUS_PORT), StatusHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


@dataclasses.dataclass(slots=True)
class NodesWithLaunchers(FakeNodes):
    """Nodes whose pods have the address of their job's launcher; pods of `unplaced` jobs are not placed."""

    launchers: dict[str, Launcher] = dataclasses.field(default_factory=dict)
    unplaced: set[str] = dataclasses.field(default_factory=set)

    async def start(self, pod: Object) -> None:
        """Place and start a pod, unless its job is listed in `unplaced`."""
        job = pod["metadata"]["labels"][LABEL_JOB]
        if job in self.unplaced:
            return
        await FakeNodes.start(self, pod)
        launcher_of_job = self.launchers.get(job)
        if launcher_of_job is not None:
            await self._send(
                "PATCH", f"{pod['metadata']['name']}/status", {"status": {"podIP": launcher_of_job.address}}
            )


@contextlib.asynccontextmanager
async def nodes_with_launchers(plane: kube.ControlPlane, namespace: str) -> AsyncIterator[NodesWithLaunchers]:
    """Nodes with all rights in a namespace."""
    headers = {"Authorization": f"Bearer {plane.tokens[kube.ADMIN]}"}
    async with (
        connect(kubeconfig=str(plane.kubeconfig())) as api,
        httpx.AsyncClient(base_url=plane.url, headers=headers, verify=plane.context(), timeout=180) as client,
    ):
        yield NodesWithLaunchers(api, namespace, client)
