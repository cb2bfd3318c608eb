"""Hub by a hostile author: it gives any answer that might harm its client, and stores what it received."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType

HTML = "<html><script>fetch('/api/v1/jobs')</script></html>"


JSON = "application/json"
BYTES = "application/octet-stream"
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
    "tile": (200, BYTES, "\x00\xff", {"ETag": '"a"', "X-Tile-Shape": "1,2", "Content-Disposition": "inline"}),
    "odd-tile": (
        200,
        BYTES,
        "\x00",
        {"ETag": "a; b", "X-Tile-Shape": "<b>", "Retry-After": "Fri, 1 Jan 2100 00:00:00"},
    ),
    "large-tile": (200, BYTES, "\x00" * (65 << 10), {}),
    "table": (200, "text/csv; charset=utf-16", "=cmd()", {"Content-Disposition": 'attachment; filename="run.exe"'}),
    "busy": (429, JSON, '{"code": "busy", "message": "m", "hint": "h"}', {"Retry-After": "3"}),
    "unchanged": (304, JSON, "", {"ETag": '"a"'}),
    "broken": (500, BYTES, "x", {}),
}
"""Status, type, body and more headers."""


def scope_frame(kind: FrameType, size: int) -> bytes:
    """A frame of MegaScope with a body of this size."""
    return frames.encode(Frame(kind, {}, bytes(size)))


FRAMES = {
    "frames": b"frame",
    "largest": scope_frame(FrameType.SCOPE_STEP, (256 << 10) - 24),
    "long-step": scope_frame(FrameType.SCOPE_STEP, 256 << 10),
    "long-run": scope_frame(FrameType.SCOPE_RUN, 1 << 20),
}


@dataclasses.dataclass
class ReceivedRequest:
    """One request that reached it."""

    path: str
    headers: Mapping[str, str]


@dataclasses.dataclass
class HostileHub:
    """Requests that it received, and what its live socket does next."""

    address: str
    port: int
    victim: "HostileHub | None" = None
    """Target of its redirects, which must not receive a request."""
    requests: list[ReceivedRequest] = dataclasses.field(default_factory=list)
    live: str = "frames"
    protocol: str | None = None
    """Subprotocol that its sockets say they speak."""
    flood: bytes = b""
    """Bytes that a socket sends again and again."""
    sent: dict[int, int] = dataclasses.field(default_factory=dict)
    """Bytes that each flooded socket has taken, by the number of requests when it connected."""

    @property
    def elsewhere(self) -> str:
        """A URL of the victim."""
        return "" if self.victim is None else f"http://{self.victim.address}:{self.victim.port}/api/v1/job"

    @property
    def redirect_was_followed(self) -> bool:
        """Return whether the victim received a request."""
        return self.victim is not None and bool(self.victim.requests)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer by the `do` of the query."""
        self.requests.append(ReceivedRequest(str(request.rel_url), dict(request.headers)))
        if request.path.endswith(("/live", "/scope")) and "Upgrade" in request.headers:
            return await self._live(request, len(self.requests))
        return await self._http(request)

    async def _http(self, request: web.Request) -> web.StreamResponse:
        how = request.query.get("do", "fine")
        if how == "cut":
            return await self._break_off(request)
        status, kind, text, more = ANSWERS[how]
        harm = {
            "Set-Cookie": "megatronapp_gateway=stolen; Path=/",
            "Access-Control-Allow-Origin": "*",
            "Access-Control-Allow-Credentials": "true",
            "Content-Security-Policy": "default-src *",
            "Location": self.elsewhere,
            "Refresh": f"0; url={self.elsewhere}",
            "X-Accel-Redirect": "/etc/passwd",
            "Clear-Site-Data": '"cookies"',
            "Link": f"<{self.elsewhere}>; rel=preload",
        }
        body = text.encode("latin-1")
        return web.Response(status=status, body=body, headers=harm | {"Content-Type": kind} | more)

    async def _flood(self, socket: web.WebSocketResponse, request: web.Request, number: int) -> None:
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        try:
            while not socket.closed:
                await socket.send_bytes(self.flood)
                self.sent[number] = self.sent.get(number, 0) + len(self.flood)
        except ConnectionError:
            return
        finally:
            transport.abort()  # what it has not sent would keep it open

    async def _break_off(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"begins": ')
        assert request.transport is not None
        request.transport.close()
        return response

    async def _live(self, request: web.Request, number: int) -> web.StreamResponse:
        if self.live == "redirect":
            return web.Response(status=302, headers={"Location": self.elsewhere})
        if self.live == "html":
            return web.Response(text=HTML, content_type="text/html")
        socket = web.WebSocketResponse(protocols=() if self.protocol is None else (self.protocol,), compress=False)
        await socket.prepare(request)
        if self.live == "text":
            await socket.send_str(HTML)
        elif self.live == "flood":
            await self._flood(socket, request, number)
        else:
            await socket.send_bytes(FRAMES.get(self.live, bytes(5 << 20)))
        async for message in socket:
            self.requests.append(ReceivedRequest("said " + repr(message.data), {}))
        return socket


@contextlib.contextmanager
def hostile_hub(address: str, port: int, *, victim: HostileHub | None = None) -> Iterator[HostileHub]:
    """Serve it in a separate thread."""
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
    assert ready.wait(120)
    try:
        yield hub
    finally:
        asyncio.run_coroutine_threadsafe(stop[0].cleanup(), loop).result(120)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(120)
        loop.close()
