"""Main loop of the operator on a real API server: a single error ends nothing, and is not reported without end."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import kube
import pytest
from fake_launchers import ADDRESSES
from fake_nodes import FakeNodes
from operator_simulation import KEY, SETTINGS, manifest
from prometheus_client import CollectorRegistry
from shared_tls import SHARED_TLS

from megatronapp_common.names import STATUS_PORT
from megatronapp_operator.backends.kubernetes.client import errors
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, ObjectList, connect
from megatronapp_operator.backends.kubernetes.client.errors import LeaseLostError
from megatronapp_operator.backends.kubernetes.client.resources import JOBS, PODS, Object
from megatronapp_operator.controller.service import ControllerHealth, LeaderService
from megatronapp_operator.controller.settings import ControllerSettings
from megatronapp_operator.keys import KeyRing
from megatronapp_operator.metrics import OperatorMetrics

pytestmark = pytest.mark.asyncio
DEADLINE_S = 120.0


class FailingApi(KubernetesApi):
    """API whose lists of jobs fail with the errors in `failures`, one after the other."""

    failures: list[Exception]
    lists = 0

    async def list_objects(self, *arguments: Any, **options: Any) -> ObjectList:
        self.lists += arguments[0] == JOBS
        if arguments[0] == JOBS and self.lists > 1 and self.failures:  # the first one is that of the start
            raise self.failures.pop(0)
        return await super().list_objects(*arguments, **options)


@contextlib.asynccontextmanager
async def serving(
    plane: kube.ControlPlane,
    namespace: str,
    failures: list[Exception],
    on_answer: Callable[[str, str, str], None] = lambda _verb, _resource, _code: None,
) -> AsyncIterator[tuple[KubernetesApi, asyncio.Task[Any], ControllerHealth, LeaderService]]:
    """An operator without watches, which lists everything again and again."""
    settings = ControllerSettings(
        render=SETTINGS, keys=KeyRing([KEY]), identity="one", lease_namespace=namespace, lease_name="none",
        namespaces=(namespace,), resync_s=0.05,
    )  # fmt: skip
    health = ControllerHealth(leads=True)
    async with (
        connect(kubeconfig=str(plane.kubeconfig())) as api,
        httpx.AsyncClient(trust_env=False, verify=SHARED_TLS) as client,
    ):
        failing = FailingApi(api._client, on_answer=on_answer)
        failing.failures = failures
        service = LeaderService(failing, client, settings, OperatorMetrics(CollectorRegistry()), health)
        task = asyncio.ensure_future(running(service))
        try:
            yield api, task, health, service
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def running(service: LeaderService) -> None:
    await service.begin()
    await service.run()


async def until(what: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await what():
            await asyncio.sleep(0.05)


async def pods(api: KubernetesApi, namespace: str) -> list[Object]:
    return (await api.list_objects(PODS, namespace)).items


async def test_an_unexpected_list_is_retried(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megatronapp_operator.controller.service.RESYNC_RETRY_S", 0.01)
    async with serving(plane, namespace, [KeyError("metadata"), TypeError("none")]) as (api, _, health, _service):
        await api.create(JOBS, manifest(namespace))

        async def made() -> bool:
            return len(await pods(api, namespace)) == 2

        async def failed_twice() -> bool:
            return sum("listing all objects failed" in record.getMessage() for record in caplog.records) >= 2

        await until(made)  # by the first list that succeeds, of whichever kind
        await until(failed_twice)
        assert health.stuck() is None


async def test_the_loss_of_the_lease_ends_it_wherever_it_is_noticed(plane: kube.ControlPlane, namespace: str) -> None:
    async with serving(plane, namespace, [LeaseLostError("gone")]) as (_, task, _health, _service):
        with pytest.raises(BaseExceptionGroup) as caught:
            async with asyncio.timeout(DEADLINE_S):
                await task
    assert caught.group_contains(LeaseLostError)


async def test_jobs_of_a_namespace_that_is_being_terminated_wait_for_that_quietly(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megatronapp_operator.controller.service.ENDING_S", 0.05)
    caplog.set_level(logging.INFO)
    async with connect(kubeconfig=str(plane.kubeconfig())) as api:
        for name in ("one", "two"):
            await api.create(JOBS, manifest(namespace, name))
    assert plane.kubectl("delete", "namespace", namespace, "--wait=false").returncode == 0
    codes = set[str]()
    async with serving(plane, namespace, [], lambda _verb, _resource, code: codes.add(code)) as started:
        api, task, health, _service = started

        async def reconciled() -> bool:
            assert not task.done()
            return _warnings(caplog) == 1

        await until(reconciled)
        began = health.finished_at

        async def reconciled_again() -> bool:
            return health.finished_at > began + 0.5

        await until(reconciled_again)
        assert await pods(api, namespace) == []
    assert _warnings(caplog) == 1
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert errors.TERMINATING in codes and "403" not in codes, "no right is missing"


async def _same_page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A launcher whose ranks make no progress."""
    await reader.readuntil(b"\r\n\r\n")
    body = json.dumps({"rankTable": None, "progress": {"attempt": 0, "iteration": 3}}).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    writer.close()


async def test_repeated_answers_of_a_launcher_count_as_new_contacts(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatronapp_operator.controller.service.POLL_S", 0.05)
    headers = {"Authorization": f"Bearer {plane.tokens[kube.ADMIN]}"}
    async with (
        serving(plane, namespace, []) as (api, _, _health, service),
        httpx.AsyncClient(base_url=plane.url, headers=headers, verify=plane.context(), timeout=180) as client,
        await asyncio.start_server(_same_page, address := next(ADDRESSES), STATUS_PORT),
    ):
        await api.create(JOBS, manifest(namespace))
        nodes, contacts = FakeNodes(api, namespace, client, address=address), set[float]()

        async def contacted_thrice() -> bool:
            await nodes.settle()
            memory = service._reconciler.memory((namespace, "job"))
            if memory is not None and memory.poll_result.progress is not None:
                contacts.add(memory.poll_result.received_at)
            return len(contacts) >= 3

        await until(contacted_thrice)


def _warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum("is being terminated; its jobs wait" in record.getMessage() for record in caplog.records)
