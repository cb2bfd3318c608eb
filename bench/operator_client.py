"""The bench's own client of the API server: few requests, one cheap watch of running pods, and a binder of pods.

Watches ask for the metadata of objects only, so that the bench takes as little of the machine as it can from what it
measures.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import Any

import aiohttp
import kube

from megatronapp_common.names import LABEL_REPLICA_TYPE

Object = dict[str, Any]
METADATA = ";as=PartialObjectMetadata{};g=meta.k8s.io;v=v1"
LINE_BYTES = 1 << 22
CONNECTIONS = 32
BINDERS = 8
ABSENT = frozenset({404, 409})
WORKERS = f"{LABEL_REPLICA_TYPE}=worker"
CONTENT = {"POST": "application/json", "PUT": "application/json", "PATCH": "application/merge-patch+json"}


class Client:
    """Requests with all rights."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @staticmethod
    @contextlib.asynccontextmanager
    async def connect(plane: kube.ControlPlane) -> AsyncIterator["Client"]:
        """A client of this API server."""
        headers = {"Authorization": f"Bearer {plane.tokens[kube.ADMIN]}"}
        connector = aiohttp.TCPConnector(ssl=plane.context(), limit=CONNECTIONS)
        timeout = aiohttp.ClientTimeout(total=None, connect=60)
        async with aiohttp.ClientSession(
            plane.url, headers=headers, connector=connector, timeout=timeout, read_bufsize=LINE_BYTES
        ) as session:
            yield Client(session)

    async def send(
        self, method: str, path: str, body: Object | None = None, *, allowed: Collection[int] = ()
    ) -> Object:
        """One request; its answer. Raises RuntimeError if it is refused with a code that is not allowed."""
        headers = {"Content-Type": CONTENT.get(method, "application/json")}
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, path, data=data, headers=headers) as answer:
            text = await answer.read()
            if not answer.ok and answer.status not in allowed:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:500]!r}")
            found: Object = json.loads(text)
            return found

    async def ready_nodes(self) -> int:
        """How many nodes are ready."""
        nodes = (await self.send("GET", "/api/v1/nodes"))["items"]
        conditions = itertools.chain.from_iterable(node["status"].get("conditions") or () for node in nodes)
        return sum(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    async def watch(self, path: str) -> AsyncIterator[tuple[str, Object]]:
        """Yield type and metadata of all present objects and of all changes, without end. `path` has a query."""
        headers = {"Accept": "application/json" + METADATA.format("List")}
        async with self._session.get(path, headers=headers) as answer:
            listing = await answer.json()
        for item in listing["items"] or ():
            yield "ADDED", item["metadata"]
        version = listing["metadata"]["resourceVersion"]
        headers = {"Accept": "application/json" + METADATA.format("")}
        while True:  # a server may end a watch that cannot keep up; it continues where it was
            url = f"{path}&watch=true&timeoutSeconds=3600&resourceVersion={version}"
            async with self._session.get(url, headers=headers) as answer:
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RuntimeError(f"watch {path}: {event['object']}")
                    version = event["object"]["metadata"]["resourceVersion"]
                    yield event["type"], event["object"]["metadata"]


class Running:
    """Worker pods whose containers run, by uid, and when the last of them began to (monotonic)."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._changed = asyncio.Event()

    async def follow(self, client: Client, namespace: str) -> None:
        """Follow the cluster without end."""
        query = f"labelSelector={WORKERS}&fieldSelector=status.phase=Running"
        async for kind, metadata in client.watch(f"/api/v1/namespaces/{namespace}/pods?{query}"):
            if kind == "DELETED" or "deletionTimestamp" in metadata:
                self.names.pop(metadata["uid"], None)
            else:
                self.names[metadata["uid"]] = metadata["name"]
            self._changed.set()

    def others(self, known: Collection[str]) -> int:
        """How many run that are not known."""
        return sum(uid not in known for uid in self.names)

    async def until(self, count: int, *, limit_s: float, known: Collection[str] = ()) -> float | None:
        """Wait until `count` unknown pods run; return the time (monotonic), or None after the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.others(known) < count:
                    self._changed.clear()
                    await self._changed.wait()
                return time.monotonic()
        return None


class Binder:
    """Gives every pod a node, in turns: a scheduler that costs next to nothing."""

    def __init__(self, client: Client, namespace: str, nodes: Sequence[str]) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._nodes: Iterator[str] = itertools.cycle(nodes)
        self._waiting: asyncio.Queue[str] = asyncio.Queue()

    async def run(self) -> None:
        """Bind pods until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(BINDERS):
                group.create_task(self._bind())
            async for kind, metadata in self._client.watch(f"{self._path}?fieldSelector=spec.nodeName="):
                if kind == "ADDED":
                    self._waiting.put_nowait(metadata["name"])

    async def _bind(self) -> None:
        while True:
            name = await self._waiting.get()
            target = {"apiVersion": "v1", "kind": "Node", "name": next(self._nodes)}
            body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
            await self._client.send("POST", f"{self._path}/{name}/binding", body, allowed=ABSENT)


async def poll(check: Callable[[], Any], *, limit_s: float, pause_s: float) -> float | None:
    """Call `check` until it is true; return the time (monotonic), or None after the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if await check():
            return time.monotonic()
        await asyncio.sleep(pause_s)
    return None
