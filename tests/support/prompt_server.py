"""A server of uvicorn that ends at once. uvicorn's own polls, and needs a fifth of a second; tests start hundreds."""

import asyncio
import concurrent.futures
import contextlib
import socket
from collections.abc import Callable
from typing import TypeVar

import uvicorn

POLL_S = 0.005
DEADLINE_S = 120.0

T = TypeVar("T")


class PromptServer(uvicorn.Server):
    """Ends as soon as it should, and its connections and tasks have ended."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """Make the server end, from another thread."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has seen that it should end, and its loop is closed
                self._loop.call_soon_threadsafe(self._ending.set)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the loop of the server, from another thread; return its result."""
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        assert self._loop is not None, "the server has not started"
        self._loop.call_soon_threadsafe(work)
        return result.result(DEADLINE_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        if not self.should_exit:
            await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()
