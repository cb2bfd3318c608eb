"""The operator's client on a real API server: what it asks for happens, and each refusal has its own exception."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import kube
import pytest
from kubernetes_asyncio.client import ApiClient, Configuration
from ports import reserved_ports

from megatronapp_operator.backends.kubernetes.client import errors
from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, connect
from megatronapp_operator.backends.kubernetes.client.resources import (
    CONFIG_MAPS,
    CREATOR,
    FIELD_MANAGER,
    PODS,
    Object,
    Resource,
)

pytestmark = pytest.mark.asyncio


def config_map(namespace: str, name: str = "one", *, labels: dict[str, str] | None = None, **data: str) -> Object:
    metadata: Object = {"name": name, "namespace": namespace} | ({"labels": labels} if labels else {})
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def pod(namespace: str, **spec: Any) -> Object:
    container = {"name": "main", "image": "none"}
    metadata = {"name": "pod", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]} | spec}


@contextlib.asynccontextmanager
async def opened(plane: kube.ControlPlane, user: str = kube.ADMIN) -> AsyncIterator[KubernetesApi]:
    async with connect(kubeconfig=str(plane.kubeconfig(user))) as api:
        yield api


async def test_what_is_created_can_be_read_and_deleted(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane) as api:
        assert await api.get(CONFIG_MAPS, namespace, "one") is None
        made = await api.create(CONFIG_MAPS, config_map(namespace, a="1"))
        assert await api.get(CONFIG_MAPS, namespace, "one") == made
        with pytest.raises(errors.AlreadyExistsError, match='"one" already exists'):
            await api.create(CONFIG_MAPS, config_map(namespace))
        assert await api.delete(CONFIG_MAPS, made)
        assert not await api.delete(CONFIG_MAPS, made)
        assert await api.get(CONFIG_MAPS, namespace, "one") is None


async def test_a_delete_removes_its_object_and_not_a_successor(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane) as api:
        old = await api.create(CONFIG_MAPS, config_map(namespace))
        await api.delete(CONFIG_MAPS, old)
        new = await api.create(CONFIG_MAPS, config_map(namespace))
        assert not await api.delete(CONFIG_MAPS, old)
        assert await api.get(CONFIG_MAPS, namespace, "one") == new


async def test_a_list_is_read_in_pages(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane) as api:
        for number in range(7):
            parity = {"parity": "even" if number % 2 == 0 else "odd"}
            await api.create(CONFIG_MAPS, config_map(namespace, f"map-{number}", labels=parity))
        every = await api.list_objects(CONFIG_MAPS, namespace, page=2)
        even = await api.list_objects(CONFIG_MAPS, namespace, labels="parity=even")
        everywhere = await api.list_objects(CONFIG_MAPS, page=3)
    assert [item["metadata"]["name"] for item in every.items] == [f"map-{number}" for number in range(7)]
    assert [item["metadata"]["name"] for item in even.items] == ["map-0", "map-2", "map-4", "map-6"]
    assert len(everywhere.items) >= 7
    assert int(everywhere.resource_version) >= int(every.resource_version) > 0


async def test_apply_removes_fields_that_were_created(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane) as api:
        created = config_map(namespace, labels={"owner": "us"}, a="1", b="2")
        await api.create(CONFIG_MAPS, created, manager=CREATOR)
        found = await api.read_labelled(CONFIG_MAPS, namespace, "one", "owner", "us")
        await api.annotate(CONFIG_MAPS, namespace, "one", {"example.com/of": "another"})
        with pytest.raises(errors.ConflictError):
            await api.own_by_apply(CONFIG_MAPS, found)
        found = await api.read_labelled(CONFIG_MAPS, namespace, "one", "owner", "us")
        await api.own_by_apply(CONFIG_MAPS, found)
        applied = await api.apply(CONFIG_MAPS, config_map(namespace, a="1"))
        assert applied["data"] == {"a": "1"} and "labels" not in applied["metadata"]
        assert applied["metadata"]["annotations"] == {"example.com/of": "another"}, "others keep their fields"
        owners = [(entry["manager"], entry["operation"]) for entry in applied["metadata"]["managedFields"]]
        assert sorted(owners) == [(FIELD_MANAGER, "Apply"), (FIELD_MANAGER, "Update")]
        version = applied["metadata"]["resourceVersion"]
        await api.own_by_apply(CONFIG_MAPS, applied)
        unchanged = await api.get(CONFIG_MAPS, namespace, "one")
        assert unchanged is not None and unchanged["metadata"]["resourceVersion"] == version


async def test_apply_sets_named_fields_and_removes_the_others(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane) as api:
        await api.apply(CONFIG_MAPS, config_map(namespace, a="1", b="2"))
        plane.kubectl("patch", "configmap", "one", "-n", namespace, "-p", '{"data": {"b": "changed", "c": "theirs"}}')
        applied = await api.apply(CONFIG_MAPS, config_map(namespace, b="2"))
    assert applied["data"] == {"b": "2", "c": "theirs"}


async def test_a_stale_object_replaces_nothing(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane) as api:
        read = await api.create(CONFIG_MAPS, config_map(namespace, a="1"))
        await api.replace(CONFIG_MAPS, read | {"data": {"a": "2"}})
        with pytest.raises(errors.ConflictError, match="has been modified"):
            await api.replace(CONFIG_MAPS, read | {"data": {"a": "3"}})
        now = await api.get(CONFIG_MAPS, namespace, "one")
    assert now is not None
    assert now["data"] == {"a": "2"}


async def test_a_dry_run_reports_what_would_happen(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane) as api:
        await api.create(PODS, pod(namespace), dry_run=True)
        assert await api.get(PODS, namespace, "pod") is None
        with pytest.raises(errors.InvalidError, match="Unsupported value") as refused:
            await api.create(PODS, pod(namespace, restartPolicy="Sometimes"), dry_run=True)
        assert [cause["field"] for cause in refused.value.details["causes"]] == ["spec.restartPolicy"]
        with pytest.raises(errors.ApiError, match="unknown field") as unknown:
            await api.create(PODS, pod(namespace, containerz=[]), dry_run=True)
        assert unknown.value.status == 400


async def test_pod_security_and_quotas_are_refusals_with_their_reason(plane: kube.ControlPlane, namespace: str) -> None:
    plane.restrict(namespace)
    async with opened(plane) as api:
        with pytest.raises(errors.ForbiddenError, match='violates PodSecurity "restricted'):
            await api.create(PODS, pod(namespace), dry_run=True)


async def test_no_right_and_no_such_kind(plane: kube.ControlPlane, namespace: str) -> None:
    async with opened(plane, "nobody") as api:
        with pytest.raises(errors.ForbiddenError, match='User "nobody" cannot create'):
            await api.create(CONFIG_MAPS, config_map(namespace))
    async with opened(plane) as api:
        with pytest.raises(errors.NotFoundError):
            await api.list_objects(Resource("v1", "configmapz"), namespace)


async def test_a_server_that_is_not_there_or_does_not_answer(namespace: str) -> None:
    codes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with ApiClient(configuration=Configuration(host=f"http://127.0.0.1:{port}")) as client:
            with pytest.raises(errors.UnavailableError, match="GET /api/v1/namespaces/test"):
                await KubernetesApi(client, request_s=0.2).get(CONFIG_MAPS, namespace, "one")
    with reserved_ports(1) as (port,):  # bound, and not listened on
        async with ApiClient(configuration=Configuration(host=f"http://127.0.0.1:{port}")) as client:
            api = KubernetesApi(client, on_answer=lambda *answered: codes.append(answered[-1]))
            with pytest.raises(errors.UnavailableError) as refused:
                await api.get(CONFIG_MAPS, namespace, "one")
    assert (refused.value.status, refused.value.code) == (0, "error") and codes == ["error"]


async def test_an_answer_that_is_no_status_object(namespace: str) -> None:
    """Something between us and the server may answer in its place."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 12\r\nConnection: close\r\n\r\n<html></html")
        await writer.drain()
        writer.close()

    codes: list[str] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, ApiClient(configuration=Configuration(host=f"http://127.0.0.1:{port}")) as client:
        api = KubernetesApi(client, on_answer=lambda *answered: codes.append(answered[-1]))
        with pytest.raises(errors.UnavailableError, match="<html>") as refused:
            await api.get(CONFIG_MAPS, namespace, "one")
    assert (refused.value.status, codes) == (502, ["502"])


async def test_a_proxy_of_the_environment_is_used_unless_it_is_not_for_this_server(
    plane: kube.ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "elsewhere.example")
        with pytest.raises(errors.UnavailableError):
            async with opened(plane) as api:
                await api.get(CONFIG_MAPS, namespace, "one")
        monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
        async with opened(plane) as api:
            assert await api.get(CONFIG_MAPS, namespace, "one") is None
