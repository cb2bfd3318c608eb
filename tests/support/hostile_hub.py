"""A hub that somebody else has written: it answers with whatever might harm who asks, and keeps what it was told."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web

HTML = "<html><script>fetch('/api/v1/jobs')</script></html>"


JSON = "application/json"
ANSWERS: dict[str, tuple[int, str, str, dict[str, str]]] = {
    "fine": (200, JSON, '{"ok": true}', {}),
    "html": (200, "text/html", HTML, {}),
    "script": (200, "text/javascript", "alert(1)", {}),
    "lie": (200, JSON, HTML, {}),
    "nothing": (200, "", "", {}),
    "redirect": (307, "text/plain", "", {}),
    "json-redirect": (302, JSON, "{}", {}),
    "login": (401, JSON, '{"message": "give me your token"}', {}),
    "packed": (200, JSON, "x", {"Content-Encoding": "gzip"}),
    "endless": (200, JSON, "", {"Content-Length": str(1 << 40)}),
}
"""Status, type, body and more headers."""


@dataclasses.dataclass
class Asked:
    """One request that reached it."""

    path: str
    headers: Mapping[str, str]


@dataclasses.dataclass
class HostileHub:
    """What it was asked, and what its live socket does next."""

    address: str
    port: int
    victim: "HostileHub | None" = None
    """Where its redirects lead, which must not be asked."""
    asked: list[Asked] = dataclasses.field(default_factory=list)
    live: str = "frames"

    @property
    def elsewhere(self) -> str:
        """A URL of the victim."""
        return "" if self.victim is None else f"http://{self.victim.address}:{self.victim.port}/api/v1/job"

    @property
    def led_somebody_away(self) -> bool:
        """Whether the victim was asked."""
        return self.victim is not None and bool(self.victim.asked)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """By the `do` of the query."""
        self.asked.append(Asked(str(request.rel_url), dict(request.headers)))
        if request.path.endswith("/live"):
            return await self._live(request)
        return await self._http(request)

    async def _http(self, request: web.Request) -> web.StreamResponse:
        how = request.query.get("do", "fine")
        if how == "cut":
            return await self._cut(request)
        status, kind, text, more = ANSWERS[how]
        harm = {
            "Set-Cookie": "megatronapp_door=stolen; Path=/",
            "Access-Control-Allow-Origin": "*",
            "Access-Control-Allow-Credentials": "true",
            "Content-Security-Policy": "default-src *",
            "Location": self.elsewhere,
            "Refresh": f"0; url={self.elsewhere}",
            "X-Accel-Redirect": "/etc/passwd",
            "Clear-Site-Data": '"cookies"',
            "Link": f"<{self.elsewhere}>; rel=preload",
        }
        return web.Response(status=status, text=text, headers=harm | {"Content-Type": kind} | more)

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"begins": ')
        assert request.transport is not None
        request.transport.close()
        return response

    async def _live(self, request: web.Request) -> web.StreamResponse:
        if self.live == "redirect":
            return web.Response(status=302, headers={"Location": self.elsewhere})
        if self.live == "html":
            return web.Response(text=HTML, content_type="text/html")
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.live == "text":
            await socket.send_str(HTML)
        else:
            await socket.send_bytes(b"frame" if self.live == "frames" else bytes(5 << 20))
        async for message in socket:
            self.asked.append(Asked("said " + repr(message.data), {}))
        return socket


@contextlib.contextmanager
def hostile_hub(address: str, port: int, *, victim: HostileHub | None = None) -> Iterator[HostileHub]:
    """Serve it in a thread of its own."""
    hub, loop, ready = HostileHub(address, port, victim), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", hub.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, address, port).start()
        stop.append(runner)
        ready.set()

    stop: list[Any] = []
    thread = threading.Thread(target=lambda: (loop.run_until_complete(serve()), loop.run_forever()), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield hub
    finally:
        asyncio.run_coroutine_threadsafe(stop[0].cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
