"""Limits of request bodies, as an ASGI server sees them."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from megatronapp_common.web import body_limit
from megatronapp_common.web.body_limit import BodyLimit
from megatronapp_common.web.guard import Guard
from megatronapp_common.web.problems import HttpError

pytestmark = pytest.mark.asyncio
LIMIT = 10
END: Message = {"type": "http.disconnect"}


def chunks(*parts: bytes, whole: bool = True) -> list[Message]:
    more: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    return [*more, {"type": "http.request", "body": b"", "more_body": False}] if whole else more


class FakeServer:
    """An ASGI server with one request, and what it receives of the application."""

    def __init__(self, messages: list[Message], **headers: str) -> None:
        self.messages = messages
        self.scope: Scope = {
            "type": "http",
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        }
        self.sent: list[Message] = []
        self.handled: list[Message] = []

    async def receive(self) -> Message:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def application(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.handled.append(await receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def run(self, limit: int | None) -> int:
        """Return the status of the answer."""
        await BodyLimit(self.application, limit_of=lambda _: limit)(self.scope, self.receive, self.send)
        return int(self.sent[0]["status"])


@pytest.mark.parametrize(
    ("parts", "status"), [((b"12345", b"67890"), 200), ((b"12345", b"67890", b"1"), 413), ((), 200)]
)
async def test_a_body_is_handled_whole_or_not_at_all(parts: tuple[bytes, ...], status: int) -> None:
    server = FakeServer(chunks(*parts))
    assert await server.run(LIMIT) == status
    bodies = [message["body"] for message in server.handled]
    assert bodies == ([b"".join(parts)] if status == 200 else [])
    assert not server.handled or not server.handled[0]["more_body"]


async def test_nothing_is_read_of_a_body_that_announces_too_much() -> None:
    server = FakeServer(chunks(b"1"), content_length=str(LIMIT + 1))
    assert await server.run(LIMIT) == 413
    assert len(server.messages) == 2


async def test_no_slow_body_is_handled_and_none_whose_sender_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limit, "BODY_S", 0.01)
    for messages, status in ((chunks(b"1", whole=False), 408), ([*chunks(b"1", whole=False), END], 400)):
        server = FakeServer(messages)
        assert await server.run(LIMIT) == status
        assert not server.handled


async def test_a_route_may_read_its_body_itself() -> None:
    server = FakeServer(chunks(b"1" * (LIMIT + 1)))
    assert await server.run(None) == 200
    assert server.handled[0]["body"] == b"1" * (LIMIT + 1)


@pytest.mark.parametrize(
    ("headers", "closed"), [({}, False), ({"content_length": "5"}, True), ({"transfer_encoding": "chunked"}, True)]
)
async def test_a_limit_of_nothing_reads_nothing_and_closes(headers: dict[str, Any], closed: bool) -> None:
    server = FakeServer(chunks(b"12345"), **headers)
    assert await server.run(0) == 200
    assert server.handled[0]["body"] == b""
    assert len(server.messages) == 2
    assert ((b"connection", b"close") in server.sent[0]["headers"]) is closed


@pytest.mark.parametrize("kind", ["http", "websocket", "lifespan"])
async def test_a_guard_answers_or_closes_what_its_check_refuses(kind: str) -> None:
    server = FakeServer(chunks())
    server.scope["type"] = kind
    refused: list[str] = []
    guard = Guard(
        server.application,
        check=lambda _: HttpError(403, "no", "not you"),
        on_refusal=lambda scope, error: refused.append(f"{scope['type']}: {error}"),
    )
    await guard(server.scope, server.receive, server.send)
    assert bool(server.handled) is (kind == "lifespan")
    assert refused == ([] if kind == "lifespan" else [f"{kind}: not you"])
    if kind == "websocket":
        assert server.sent == [{"type": "websocket.close", "code": 1008, "reason": "not you"}]
    elif kind == "http":
        assert server.sent[0]["status"] == 403


async def test_a_guard_lets_pass_what_its_check_allows() -> None:
    server = FakeServer(chunks())
    await Guard(server.application, check=lambda _: None)(server.scope, server.receive, server.send)
    assert server.handled
