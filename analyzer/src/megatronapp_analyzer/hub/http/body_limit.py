"""Limits of request bodies, applied before any route reads them; lower for those who may not send prompts."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatronapp_analyzer.hub.http.access import API
from megatronapp_analyzer.web.problems import problem_response
from megatronapp_analyzer.web.roles import ROLE
from megatronapp_common.web.origin import READING
from megatronapp_common.web.tokens import TokenRole

MAX_BODY_BYTES = 64 << 10
"""Limit of JSON that users and programs send."""
MAX_PROMPT_BYTES = 4 << 20
"""Limit of prompts, which only controllers send; rank 0 accepts no more."""
MAX_DISCARDED_BYTES = 16 << 20
BODY_S = 30.0
"""Longest time in which a body must be received."""
PROMPTS_PATH = "/api/v1/scope/runs"


class BodyLimit:
    """ASGI layer after the guard. Answers 413 for a body that is too long; reads no more of it than the limit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through with its whole body, or answer it here."""
        if scope["type"] != "http" or not scope["path"].startswith(API) or scope["method"] in READING:
            await self._app(scope, receive, send)
            return
        limit = limit_of(scope)
        try:
            async with asyncio.timeout(BODY_S):
                body = await _read(receive, limit)
        except TimeoutError:
            await _refuse(408, "too-slow", f"the body took more than {BODY_S:g} s")(scope, receive, send)
            return
        if body is None:
            await _refuse(413, "too-large", f"the body has more than {limit} bytes")(scope, receive, send)
            return
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)


def limit_of(scope: Scope) -> int:
    """Return the number of bytes that the body of a request may have."""
    prompts = scope["path"].rstrip("/") == PROMPTS_PATH and scope.get(ROLE) == TokenRole.CONTROLLER
    return MAX_PROMPT_BYTES if prompts else MAX_BODY_BYTES


async def _read(receive: Receive, limit: int) -> bytes | None:
    """Return the body; None if it is longer, or if its sender disconnected, which then gets no answer.

    The excess is read and dropped, up to a bound: a sender that is still writing would not receive the answer.
    """
    body, size = bytearray(), 0
    while size <= MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] != "http.request":
            return None
        piece = message.get("body", b"")
        size += len(piece)
        if size <= limit:
            body += piece
        if not message.get("more_body"):
            return bytes(body) if size <= limit else None
    return None


def _refuse(status: int, code: str, text: str) -> ASGIApp:
    """Return an answer that ends the connection, because its sender may have more to send."""
    response = problem_response(status, code, text, "Send less, or at once.")
    response.headers["Connection"] = "close"
    return response
