"""kopf's watches on answers of any depth, over connections that end amid an event, and with tokens that are renewed."""

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest
import yaml
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.names import GROUP, VERSION
from megatronapp_operator.backends.kubernetes.client.decoding import MAX_DEPTH, bound_depth
from megatronapp_operator.backends.kubernetes.client.resources import Object
from megatronapp_operator.controller.bounded_session import BoundedLines
from megatronapp_operator.controller.watches import Watches

DEADLINE_S = 180.0


def nested(levels: int, inner: Any = 1) -> Any:
    """Return a value with this number of maps and lists around another."""
    for level in range(levels):
        inner = {"a": inner, "b]}": '"{['} if level % 2 else [inner, "{"]
    return inner


@given(st.integers(0, MAX_DEPTH), st.integers(1, 50), st.sampled_from([0, 900, 3000]))
def test_what_is_not_too_deep_is_unchanged_and_the_rest_is_null(shallow: int, deeper: int, more: int) -> None:
    text = json.dumps(nested(shallow))
    assert bound_depth(text.encode()).decode() == text
    below = "[" * (deeper + more) + "]" * (deeper + more)
    deep = json.dumps(nested(MAX_DEPTH, "@")).replace('"@"', below)
    assert json.loads(bound_depth(deep.encode())) == nested(MAX_DEPTH, None)


@given(st.binary())
def test_what_is_no_json_is_unchanged(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        json.loads(data)
        return
    assert bound_depth(data) == data


class Parts:
    """Stream that arrives in these parts."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


@given(st.lists(st.integers(0, 2000), min_size=1, max_size=4), st.lists(st.integers(1, 400), max_size=20))
def test_lines_are_whole_however_they_arrive(depths: list[int], sizes: list[int]) -> None:
    data = b"".join(b"[" * depth + b"1" + b"]" * depth + b"\n" for depth in depths) + b'{"type": "ADD'
    parts = list[bytes]()
    for size in [*sizes, len(data)]:
        parts.append(data[:size])
        data = data[size:]

    async def read() -> bytes:
        lines = BoundedLines(cast(aiohttp.StreamReader, Parts(parts)))
        return b"".join([chunk async for chunk in lines.iter_chunked(1)])

    found = asyncio.run(read()).splitlines()
    assert len(found) == len(depths), "what follows the last line is an event that was cut off"
    assert [line.count(b"[") for line in found] == [min(depth, MAX_DEPTH) for depth in depths]


def kind(plural: str, singular: str, name: str) -> Object:
    verbs = ["list", "watch"]
    return {"name": plural, "singularName": singular, "kind": name, "namespaced": True, "verbs": verbs}


OUR_VERSION = {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}
DISCOVERY = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {"resources": [kind("namespaces", "namespace", "Namespace")]},
    "/apis": {"groups": [{"name": GROUP, "versions": [OUR_VERSION], "preferredVersion": OUR_VERSION}]},
    f"/apis/{GROUP}/{VERSION}": {"resources": [kind("megatronjobs", "megatronjob", "MegatronJob")]},
}
"""Answers by which kopf finds what to watch."""


def job(name: str, version: int) -> Object:
    metadata = {"name": name, "namespace": "here", "uid": name, "resourceVersion": str(version)}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "MegatronJob", "metadata": metadata, "spec": {}}


class JobServer:
    """API server with jobs, which takes a single token. Each watch has a job, and ends once the token has changed."""

    def __init__(self) -> None:
        self.token = "first"
        self.changed = asyncio.Event()
        self.refused = 0
        self.versions: list[str] = []
        """Version from which each watch began."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            self.refused += 1
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": [job("listed", 9)]})
        return await self._watch(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.versions.append(request.query["resourceVersion"])
        number = 10 + len(self.versions)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        event = json.dumps({"type": "ADDED", "object": job(f"of-{self.token}", number)}).encode()
        await response.write(event + b"\n" + event[:20])  # the connection ends amid the next event
        await self.changed.wait()
        self.changed.clear()
        return response


@contextlib.asynccontextmanager
async def watching(server: JobServer, kubeconfig: pathlib.Path, seen: list[str]) -> AsyncIterator[Watches]:
    """Watch the jobs of a server by the token that it has now; `seen` receives their names."""
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    write_kubeconfig(kubeconfig, runner.addresses[0][1], server.token)
    watches = Watches(str(kubeconfig), ["here"], lambda _resource, _kind, obj: seen.append(obj["metadata"]["name"]))
    try:
        watches.start(asyncio.get_running_loop(), profiles=())
        async with asyncio.timeout(DEADLINE_S):
            yield watches
    finally:
        await asyncio.to_thread(watches.stop)
        await runner.cleanup()


def write_kubeconfig(path: pathlib.Path, port: int, token: str) -> None:
    document = {
        "clusters": [{"name": "a", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "a", "user": {"token": token}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "current-context": "a",
    }
    path.write_text(yaml.safe_dump(document), encoding="utf-8")


async def until_seen(watches: Watches, seen: list[str], name: str) -> None:
    while name not in seen:
        assert watches.alive, watches.error
        await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_watches_continue_with_a_renewed_token(tmp_path: pathlib.Path) -> None:
    server, kubeconfig, seen = JobServer(), tmp_path / "kubeconfig", list[str]()
    async with watching(server, kubeconfig, seen) as watches:
        await until_seen(watches, seen, "of-first")
        server.token = "second"
        kubeconfig.write_text(kubeconfig.read_text(encoding="utf-8").replace("first", "second"), encoding="utf-8")
        server.changed.set()
        await until_seen(watches, seen, "of-second")
    assert seen == ["listed", "of-first", "of-second"]
    assert server.versions == ["10", "11"], "nothing is listed again"
    assert server.refused == 1 and watches.error is None


@pytest.mark.full("kopf waits five seconds before it ends")
@pytest.mark.asyncio
async def test_watches_end_with_a_token_that_stays_refused(tmp_path: pathlib.Path) -> None:
    """The operator is restarted then. The same token is not tried again and again."""
    server, seen = JobServer(), list[str]()
    async with watching(server, tmp_path / "kubeconfig", seen) as watches:
        await until_seen(watches, seen, "of-first")
        server.token = "second"
        server.changed.set()
        while watches.alive:
            await asyncio.sleep(0.01)
    assert server.refused == 1 and "credentials" in str(watches.error)
