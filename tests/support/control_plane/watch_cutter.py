"""Proxy in front of an API server that ends watches and lets them begin again at another version."""

import asyncio
import contextlib
import dataclasses
import pathlib
import random
import re
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import kube

READ = 1 << 16
EXPIRED = "1"
"""A version that the API server has forgotten: it answers 410."""


@dataclasses.dataclass(slots=True)
class WatchCutter:
    """Proxy for plain HTTP, one request for each connection. Watches end amid their events, by chance."""

    plane: kube.ControlPlane
    chance: random.Random
    most_events: int = 4
    """The most pieces of its answer after which a watch is cut off."""
    interruptions: int = 0
    replays: int = 0
    expired: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    """The version from which each path was last watched."""
    _connections: set["asyncio.Task[None]"] = dataclasses.field(default_factory=set)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of a new connection in a separate task."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        """End all connections, and wait for that."""
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            await _abort(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = re.search(r"(?mi)^content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            watches = "watch=true" in head.split("\r\n", 1)[0]
            head = self._turned_back(head) if watches else head
            await self._forward(_closing(head).encode("latin-1") + body, writer, interrupt=watches)

    async def _forward(self, request: bytes, writer: asyncio.StreamWriter, *, interrupt: bool) -> None:
        address = urlsplit(self.plane.url)
        answer, server = await asyncio.open_connection(address.hostname, address.port, ssl=self.plane.context())
        left = self.chance.randint(1, self.most_events) if interrupt else None
        try:
            server.write(request)
            while data := await answer.read(READ):
                if left == 0:
                    self.interruptions += 1
                    writer.write(data[: self.chance.randrange(len(data))])
                    await writer.drain()
                    return
                writer.write(data)
                await writer.drain()
                left = None if left is None else left - 1
            writer.close()
            await writer.wait_closed()
        finally:
            await _abort(server)

    def _turned_back(self, head: str) -> str:
        """The request for a watch; often from an older version than it asks for."""
        found = re.match(r"GET (\S+?)\?\S*?resourceVersion=(\d+)", head)
        if found is None:
            return head
        path, version = found[1], found[2]
        before, self.versions[path] = self.versions.get(path), version
        if before is None:
            return head
        match self.chance.choice(("as asked", "replayed", "expired")):
            case "replayed":
                self.replays += 1
                other = before
            case "expired":
                self.expired += 1
                other = EXPIRED
            case _:
                return head
        return head.replace(f"resourceVersion={version}", f"resourceVersion={other}", 1)


@contextlib.asynccontextmanager
async def cutting(
    plane: kube.ControlPlane, folder: pathlib.Path, seed: int
) -> AsyncIterator[tuple[kube.ControlPlane, WatchCutter]]:
    """The control plane as it is seen through such a proxy, and the proxy."""
    cutter = WatchCutter(plane, random.Random(seed))
    (folder / "certificates").symlink_to(plane.folder / "certificates")
    async with await asyncio.start_server(cutter.accept, "127.0.0.1", 0, limit=READ) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            yield dataclasses.replace(plane, folder=folder, url=f"http://127.0.0.1:{port}"), cutter
        finally:
            server.close()
            await cutter.close()


async def _abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once and wait for it: a writer that outlives its loop warns."""
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def _closing(head: str) -> str:
    lines = [line for line in head.split("\r\n") if line and not line.lower().startswith("connection:")]
    return "\r\n".join([*lines, "Connection: close", "", ""])
