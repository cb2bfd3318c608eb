"""Limits of the size of request bodies, and of the time that they take."""

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatronapp_common.web.problems import Answer, HttpError, problem_response

BODY_S = 30.0
"""Longest time in which a body must be received, in seconds."""


class IncompleteBodyError(HttpError):
    """The client disconnected before its body was complete. The answer reaches no client."""

    def __init__(self) -> None:
        super().__init__(400, "incomplete-body", "the client disconnected before its body was complete")


class BodyLimit:
    """ASGI layer that reads a body whole before its request is handled, or answers 413 or 408.

    `limit_of` gives the limit of a request's body in bytes. None: its route reads it. 0: nothing is read, and the
    connection is closed after the answer if a body is announced.

    What follows of a refused body is read and dropped for at most `BoundedHttpProtocol.head_s`: a connection that is
    closed at once is reset while the client still sends, and a client that reads the answer only after
    sending loses it.
    """

    def __init__(
        self, app: ASGIApp, *, limit_of: Callable[[Scope], int | None], answer: Answer = problem_response
    ) -> None:
        self._app = app
        self._limit_of = limit_of
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its whole body, or answer it here."""
        limit = self._limit_of(scope) if scope["type"] == "http" else None
        if limit is None:
            await self._app(scope, receive, send)
        elif limit == 0:
            await self._app(scope, _replayed(b"", receive), _closing(send) if _has_body(scope) else send)
        else:
            try:
                body = await read_body(scope, receive, limit, seconds=BODY_S, code="too-large")
            except HttpError as error:
                await self._answer(error)(scope, receive, send)
            else:
                await self._app(scope, _replayed(body, receive), send)


async def read_body(
    scope: Scope, receive: Receive, limit: int, *, seconds: float = BODY_S, code: str = "too-long"
) -> bytes:
    """Read the body of a request. Raises HttpError: 413 for more than `limit` bytes, 408 for one that takes too long.

    Nothing is read of a body that announces too many bytes. Raises IncompleteBodyError if the client disconnects.
    """
    too_long = HttpError(413, code, f"the body has more than {limit} bytes", "Send less.")
    if _declared_size(scope) > limit:
        raise too_long
    body = bytearray()  # small chunks are added without a copy of those before
    try:
        async with asyncio.timeout(seconds):
            while (message := await receive())["type"] == "http.request":
                body += message.get("body", b"")
                if len(body) > limit:
                    raise too_long
                if not message.get("more_body"):
                    return bytes(body)
    except TimeoutError as error:
        raise HttpError(408, "too-slow", f"the body took more than {seconds:g} s", "Send it at once.") from error
    raise IncompleteBodyError


def _has_body(scope: Scope) -> bool:
    """Return true if the headers announce a body."""
    headers = Headers(scope=scope)
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _declared_size(scope: Scope) -> int:
    """Return the value of Content-Length; 0 without one."""
    size = Headers(scope=scope).get("content-length", "")
    return int(size) if size.isascii() and size.isdecimal() else 0


def _closing(send: Send) -> Send:
    """Wrap `send` to close the connection after the answer."""

    async def close(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        await send(message)

    return close


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read, and then what follows."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
