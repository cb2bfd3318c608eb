"""Passes a request on to a hub and its answer back. A hub is not trusted: only JSON of a sane size comes through.

Nothing of the caller reaches the hub but method, path, query and a JSON body; nothing of the hub's headers reaches the
caller. Redirects are not followed, and content that is compressed is not taken (it was not asked for).
"""

import asyncio
import contextlib
import logging
import urllib.parse
from http import HTTPStatus

import aiohttp
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from megatronapp_operator.door import protocols
from megatronapp_operator.door.problems import Refusal

LOG = logging.getLogger(__name__)
JSON = "application/json"
MAX_ANSWER_BYTES = 256 << 20
CHUNK_BYTES = 64 << 10
TIMEOUT = aiohttp.ClientTimeout(total=120, connect=5, sock_read=30)
AT_ONCE = 64
"""Connections to one hub; no hub takes from another's."""
SEND_S = 30.0
"""So long may a caller take no bytes."""
_HUB_LOG = "Look at the log of the job's hub."


def new_session() -> aiohttp.ClientSession:
    """Connections to hubs: no cookies, no proxies of the environment, nothing unpacked."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, limit_per_host=AT_ONCE, socket_factory=lambda address: protocols.towards(*address[:3])
        ),
        timeout=TIMEOUT,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


def address_of(hub: str, path: str, query: str) -> URL:
    """The hub's URL for a path below `/api/v1/`. A token in the query stays here."""
    pairs = [pair for pair in urllib.parse.parse_qsl(query, keep_blank_values=True) if pair[0] != "token"]
    return URL(f"http://{hub}/api/v1/{path}" + (f"?{urllib.parse.urlencode(pairs)}" if pairs else ""), encoded=True)


async def ask(
    session: aiohttp.ClientSession,
    url: URL,
    *,
    token: str,
    method: str = "GET",
    body: bytes | None = None,
) -> "HubAnswer":
    """The hub's answer, of which nothing has been read yet. Raises Refusal (502, 504) if it cannot be passed on."""
    headers = {"Authorization": f"Bearer {token}", "Accept": JSON, "Accept-Encoding": "identity"}
    headers |= {} if body is None else {"Content-Type": JSON}
    try:
        answer = await session.request(method, url, headers=headers, data=body, allow_redirects=False)
    except TimeoutError as error:
        raise Refusal(504, "hub-silent", "the job's hub did not answer in time", "Try again in a moment.") from error
    except (aiohttp.ClientError, ValueError, OSError) as error:
        text = f"the job's hub does not answer: {type(error).__name__}"
        raise Refusal(502, "hub-not-there", text, "It may be starting; try again in a moment.") from error
    wrong = what_is_wrong(answer)
    if wrong is not None:
        answer.close()
        raise Refusal(502, "bad-hub", f"the job's hub answered with {wrong}", _HUB_LOG)
    return HubAnswer(answer)


def what_is_wrong(answer: aiohttp.ClientResponse) -> str | None:
    """Why an answer must not be passed on."""
    status = answer.status
    if not HTTPStatus.OK <= status < 600 or HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"status {status}"
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return f"status {status}: it belongs to another life of the job"
    return None if status == HTTPStatus.NO_CONTENT else _wrong_content(answer)


def _wrong_content(answer: aiohttp.ClientResponse) -> str | None:
    if answer.content_type != JSON:
        return "something that is not JSON"
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        return "compressed content"
    if (answer.content_length or 0) > MAX_ANSWER_BYTES:
        return f"more than {MAX_ANSWER_BYTES} bytes"
    return None


class HubAnswer(Response):
    """Streams the hub's body. Where that breaks off or is too long, so does ours, and the caller sees that it did."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        super().__init__(status_code=answer.status)
        self._answer = answer
        self.share = contextlib.ExitStack()
        """Is given back when all is sent."""
        self.raw_headers = [(b"content-type", JSON.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self.share:
            async with self._answer:
                await self._send_all(send)

    async def _send_all(self, send: Send) -> None:
        headers = [] if self.status_code == HTTPStatus.NO_CONTENT else self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        try:
            if self.status_code != HTTPStatus.NO_CONTENT:
                await self._stream(send)
        except (aiohttp.ClientError, TimeoutError, OSError, _TooLongError) as error:
            LOG.warning("an answer of a hub broke off: %s", error or type(error).__name__)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, send: Send) -> None:
        total = 0
        async for chunk in self._answer.content.iter_chunked(CHUNK_BYTES):
            total += len(chunk)
            if total > MAX_ANSWER_BYTES:
                raise _TooLongError(f"it has more than {MAX_ANSWER_BYTES} bytes")
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})


class _TooLongError(Exception):
    """The hub sends without end."""
