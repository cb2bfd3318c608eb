"""The layer that adds headers, as an ASGI server sees it."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.types import Message, Receive, Send

from megatronapp_common.web.security_headers import SAFE_HEADERS, SecurityHeaders

Pairs = list[tuple[bytes, bytes]]


def answered(given: Pairs, **how: Any) -> list[Message]:
    """Return what a server receives from an application with these headers."""
    sent: list[Message] = []

    async def app(_: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": given})
        await send({"type": "http.response.body", "body": b"x"})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(SecurityHeaders(app, **how)({"type": "http"}, receive, send))
    return sent


def test_every_answer_gets_the_safe_headers_and_those_of_a_route_stay() -> None:
    given = [(b"Cache-Control", b"public"), (b"set-cookie", b"a"), (b"set-cookie", b"b")]
    start, body = answered(given, more={"Content-Security-Policy": "sandbox"})
    assert start["headers"][:3] == given
    added = {name.decode(): value.decode() for name, value in start["headers"][3:]}
    expected = {name.lower(): value for name, value in SAFE_HEADERS.items() if name != "Cache-Control"}
    assert added == expected | {"content-security-policy": "sandbox"}
    assert body == {"type": "http.response.body", "body": b"x"}


def test_a_route_overrides_in_any_case_of_letters() -> None:
    assert len(answered([(b"X-CONTENT-TYPE-OPTIONS", b"other")])[0]["headers"]) == len(SAFE_HEADERS)


def test_what_is_no_http_passes_untouched() -> None:
    sent: list[Message] = []

    async def app(_: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(SecurityHeaders(app)({"type": "websocket"}, receive, send))
    assert sent == [{"type": "websocket.accept"}]
