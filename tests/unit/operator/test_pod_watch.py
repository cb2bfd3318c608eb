"""The watch of pods: what it decodes, and how it continues over cut connections and forgotten versions."""

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_asyncio.client import ApiClient, Configuration

from megatronapp_operator.backends.kubernetes.client.api import KubernetesApi, WatchLimits
from megatronapp_operator.backends.kubernetes.client.decoding import (
    LineBuffer,
    PodEvents,
    decode_object,
    decode_pod,
    decode_pod_events,
    decode_pod_page,
)
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, ExpiredError, UnavailableError
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.backends.kubernetes.pod_record import read_pod
from megatronapp_operator.backends.kubernetes.store import ObjectStore
from megatronapp_operator.controller import pod_watch
from megatronapp_operator.controller.pod_watch import PodWatch

DEADLINE_S = 180.0
TIME = "2026-11-22T03:00:00Z"
EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


def pod(name: str, version: int, *, namespace: str = "here", **status: Any) -> Object:
    labels = {"job-name": "job", "job-uid": "job-uid", "replica-type": "worker", "replica-index": "0", "attempt": "0"}
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "creationTimestamp": TIME,
        "labels": {f"megatronapp.io/{label}": value for label, value in labels.items()},
        "ownerReferences": [{"uid": "job-uid", "kind": "MegatronJob"}],
        "managedFields": [{"manager": "megatron-operator", "fieldsV1": {"f:spec": {"f:containers": {}}}}],
    }
    containers = [{"name": "trainer", "image": "a", "env": [{"name": "A", "value": "1"}]}, {"name": "agent"}]
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": containers}, "status": status}


def event(kind: str, obj: Object) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    return event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})


STATES = st.sampled_from(
    [
        {"running": {"startedAt": TIME}},
        {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}},
        {"terminated": {"exitCode": 65, "finishedAt": TIME, "message": '{"reason": "RankFailed", "rank": 3}'}},
    ]
)
CONDITIONS = st.sampled_from(
    [
        {"type": "Ready", "status": "False", "lastTransitionTime": TIME},
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/9 nodes"},
        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
    ]
)


PHASES = st.sampled_from(["Pending", "Running", "Failed", "Succeeded"])


@given(STATES, st.lists(CONDITIONS, max_size=3), PHASES, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_decoding_drops_nothing_that_a_record_holds(
    state: Object, conditions: list[Object], phase: str, has: tuple[bool, bool, bool]
) -> None:
    deleted, node, sidecar = has
    whole = pod("a", 7, phase=phase, conditions=conditions, containerStatuses=[{"name": "trainer", "state": state}])
    whole["metadata"]["annotations"] = {
        "megatronapp.io/template-hash": "abc",
        "megatronapp.io/excluded-nodes": "n1,n2",
        "megatronapp.io/topology": "rack",
    }
    if deleted:
        whole["metadata"] |= {"deletionTimestamp": TIME, "deletionGracePeriodSeconds": 30, "finalizers": ["a/b"]}
    if node:
        whole["spec"]["nodeName"] = "node-1"
    if sidecar:
        whole["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}, {"name": "data"}]
        whole["status"]["initContainerStatuses"] = [
            {"name": "proxy", "state": {"running": {"startedAt": TIME}}},
            {"name": "data", "state": state},
        ]
    expected = read_pod(whole)
    assert expected is not None
    data = json.dumps(whole).encode()
    assert read_pod(decode_pod(data)) == expected
    page = {"metadata": {"resourceVersion": "9", "continue": "x"}, "items": [whole]}
    decoded = decode_pod_page(json.dumps(page).encode())
    assert decoded["metadata"] == page["metadata"] and [read_pod(item) for item in decoded["items"]] == [expected]
    found = decode_pod_events([event("MODIFIED", whole)])
    assert (found.version, [(kind, read_pod(item)) for kind, item in found.events]) == ("7", [("MODIFIED", expected)])


@given(st.lists(st.binary(max_size=5).filter(lambda line: b"\n" not in line)), st.lists(st.integers(1, 9)))
def test_lines_are_the_same_however_they_arrive(lines: list[bytes], sizes: list[int]) -> None:
    data, buffer, found = b"".join(line + b"\n" for line in lines), LineBuffer(), list[bytes]()
    for size in [*sizes, len(data)]:
        found += buffer.add(data[:size])
        data = data[size:]
    assert found == lines


def test_the_rest_of_a_watch_is_versions_and_errors() -> None:
    unreadable = copy.deepcopy(pod("bad", 5))
    unreadable["metadata"]["labels"] = 7
    found = decode_pod_events([event("ADDED", pod("a", 4)), event("ADDED", unreadable), bookmark(6)])
    assert (len(found.events), found.version) == (1, "6"), (
        "a pod that cannot be read keeps nothing else from being seen"
    )
    with pytest.raises(ExpiredError, match="too old"):
        decode_pod_events([event("ADDED", pod("a", 4)), event("ERROR", EXPIRED)])
    with pytest.raises(UnavailableError):
        decode_pod_events([b"<html>"])
    status = decode_pod(json.dumps({"kind": "Status", "metadata": {}, "status": "Success"}).encode())
    assert status["kind"] == "Status", "the answer to a delete that took effect at once"


class PodServer:
    """API server for pods: lists what `pods` has, and answers each watch by the next of `answers`, then never."""

    def __init__(self, *answers: list[bytes] | None) -> None:
        self.pods: list[Object] = []
        self.version = 10
        self.answers = list(answers)
        self.watched: list[str] = []
        """Version from which each watch began."""
        self.lists = 0
        self.idle = asyncio.Event()
        """Set once a watch waits for events that never arrive."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.lists += 1
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": self.pods})
        self.watched.append(request.query["resourceVersion"])
        assert request.query["allowWatchBookmarks"] == "true" and request.query["labelSelector"]
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        chunks = self.answers.pop(0) if self.answers else None
        await response.prepare(request)
        for chunk in chunks or ():
            await response.write(chunk)
        if chunks is None:
            self.idle.set()
            await asyncio.Event().wait()
        return response


@contextlib.asynccontextmanager
async def following(
    server: PodServer, *, namespace: str | None = None, silence_s: float = DEADLINE_S
) -> AsyncIterator[tuple[ObjectStore, list[Any]]]:
    """Follow the pods of a server; the store, and the jobs of each change."""
    app = web.Application()
    app.router.add_get("/api/v1/pods", server.answer)
    app.router.add_get("/api/v1/namespaces/{namespace}/pods", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    store, changes = ObjectStore(), list[Any]()
    async with ApiClient(configuration=settings) as client:
        limits = WatchLimits(silence_s=silence_s)
        watch = PodWatch(KubernetesApi(client), store, namespace, on_change=changes.append, limits=limits)
        await watch.list_pods()
        task = asyncio.create_task(watch.follow())
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield store, changes
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await runner.cleanup()


def versions(store: ObjectStore, namespace: str = "here") -> dict[str, int]:
    return {record.name: record.version for record in store.pods(namespace, "job-uid")}


@pytest.mark.asyncio
async def test_an_interrupted_watch_continues_after_the_last_event() -> None:
    whole = event("MODIFIED", pod("a", 12)) + event("ADDED", pod("b", 13)) + event("DELETED", pod("c", 14))
    chunks = [whole[first : first + 700] for first in range(0, len(whole), 700)]
    server = PodServer(chunks, [bookmark(20), event("ADDED", pod("lost", 21))[:-40]], None)
    server.pods = [pod("a", 8), pod("c", 9)]
    async with following(server) as (store, changes):
        await server.idle.wait()
        assert versions(store) == {"a": 12, "b": 13}
        assert changes and set().union(*changes) == {("here", "job")}
    assert (server.lists, server.watched) == (1, ["10", "14", "20"]), "no pod is listed again"


@pytest.mark.parametrize("answer", [[event("ADDED", pod("b", 13)), event("ERROR", EXPIRED)]])
@pytest.mark.asyncio
async def test_a_forgotten_version_has_all_pods_listed_again(answer: list[bytes]) -> None:
    server = PodServer(answer, None)
    server.pods = [pod("a", 8), pod("other", 9, namespace="there")]
    async with following(server, namespace="here") as (store, changes):
        server.pods, server.version = [pod("b", 31)], 40
        await server.idle.wait()
        assert versions(store) == {"b": 31}, "what was deleted meanwhile is not in the list"
        assert ("here", "job") in changes[-1]
        assert versions(store, "there") == {"other": 9}, "the list of a namespace says nothing about another"
    assert (server.lists, server.watched) == (2, ["10", "40"])


@pytest.mark.asyncio
async def test_watches_that_end_at_once_begin_again_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses, real = list[float](), asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.extend([seconds] if seconds else [])
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    server = PodServer(*([[]] * (pod_watch.QUIET_FAILURES + 1)), [bookmark(20)], None)
    async with following(server) as (_, _):
        await server.idle.wait()
    *longer, after = pauses
    assert longer == sorted(longer) and longer[-1] > 4 * longer[0] and after < longer[0], pauses
    assert "without an event" in caplog.text and server.lists == 2


@pytest.mark.asyncio
async def test_a_silent_connection_is_given_up() -> None:
    again = [event("ADDED", pod("a", 12))]
    server = PodServer(None, *[again] * 1000)  # on a busy machine an answer may arrive after the silence
    async with following(server, silence_s=0.2) as (store, _):
        while versions(store) != {"a": 12}:
            await asyncio.sleep(0.01)
    assert server.watched[:2] == ["10", "10"]


@pytest.mark.parametrize(
    ("fault", "logged"),
    [
        (ApiError("no such version", status=504), "does not continue"),
        (ZeroDivisionError("an object of an unexpected shape"), "failed"),
    ],
)
@pytest.mark.asyncio
async def test_an_error_that_stays_ends_in_a_new_list(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception, logged: str
) -> None:
    faults = [fault] * (pod_watch.QUIET_FAILURES + 1)

    def faulty(lines: list[bytes]) -> PodEvents:
        if faults:
            raise faults.pop()
        return decode_pod_events(lines)

    monkeypatch.setattr(pod_watch, "decode_pod_events", faulty)
    monkeypatch.setattr(pod_watch, "PAUSE_S", (0.0, 0.0))
    server = PodServer(*([[event("ADDED", pod("a", 12))]] * 5), None)
    async with following(server) as (store, _):
        await server.idle.wait()
        assert versions(store) == {"a": 12}
    assert server.lists > 1 and logged in caplog.text


@given(st.sampled_from([5, 1100, 9000]), st.booleans())
def test_managed_fields_of_any_depth_hide_no_pod(depth: int, array: bool) -> None:
    """An API server stores them as a client has written them: a user's pod must not stop the watch for all."""
    deep, usual = pod("deep", 4), pod("b", 5)
    deep["metadata"]["managedFields"] = "@"
    deep["metadata"]["annotations"] = {"text": 'a "quoted" {[\\'}
    opening, closing = (b"[", b"]") if array else (b'{"f:a":', b"}")
    fields = opening * depth + b'{"f:b":{},"]":"}"}' + closing * depth

    def with_fields(data: bytes) -> bytes:
        return data.replace(b'"@"', fields)

    page = with_fields(json.dumps({"metadata": {"resourceVersion": "9"}, "items": [deep, usual]}).encode())
    expected = [read_pod(deep | {"metadata": deep["metadata"] | {"managedFields": []}}), read_pod(usual)]
    assert None not in expected
    assert [read_pod(item) for item in decode_pod_page(page)["items"]] == expected
    assert [item["metadata"]["name"] for item in decode_object(page)["items"]] == ["deep", "b"]
    found = decode_pod_events([with_fields(event("ADDED", deep)), event("ADDED", usual)])
    assert (found.version, [read_pod(item) for _, item in found.events]) == ("5", expected)


def test_a_pod_that_cannot_be_decoded_is_left_out_of_a_page() -> None:
    unreadable = copy.deepcopy(pod("bad", 5))
    unreadable["metadata"]["labels"] = 7
    page = {"metadata": {"resourceVersion": "9", "continue": "x"}, "items": [pod("a", 4), unreadable]}
    found = decode_pod_page(json.dumps(page).encode())
    assert found["metadata"] == page["metadata"] and [item["metadata"]["name"] for item in found["items"]] == ["a"]
    for data in (b"<html>", b'{"metadata": {}, "items": [', b'{"items": []}', b'{"a":' * 5000):
        with pytest.raises(UnavailableError):
            decode_pod_page(data)
