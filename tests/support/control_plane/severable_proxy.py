"""A TCP proxy on loopback that can be cut off and joined again, as a network can."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class SeverableProxy:
    """Proxy that forwards bytes to one port while it is `joined`; cut off, it swallows what it receives and answers
    nothing."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._joined = asyncio.Event()
        self._joined.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def sever(self) -> None:
        """Stop forwarding bytes either way."""
        self._joined.clear()

    def join(self) -> None:
        """Forward again, beginning with the bytes that were withheld."""
        self._joined.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one accepted connection."""
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all open connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                while data := await source.read(65536):
                    await self._joined.wait()
                    sink.write(data)
                    await sink.drain()
            finally:
                sink.close()


@contextlib.asynccontextmanager
async def proxy_to(port: int) -> AsyncIterator[tuple[SeverableProxy, int]]:
    """A wire to a port of loopback, and the port to connect to instead."""
    wire = SeverableProxy(port)
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    async with server:
        yield wire, int(server.sockets[0].getsockname()[1])
        await wire.close()
