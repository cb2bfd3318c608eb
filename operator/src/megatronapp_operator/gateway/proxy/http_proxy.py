"""Forwards a request to a hub and its response back. A hub is not trusted: only what `response_policy` names passes.

Of the caller's request method, path, query, a JSON body and an entity tag reach the hub, and the name of a caller who
controls its job; of the hub's headers those that `response_policy` passes reach the caller. Redirects are not followed,
and compressed content, which was not requested, is refused.
"""

import asyncio
import contextlib
import dataclasses
import logging
import re
import urllib.parse
from http import HTTPStatus

import aiohttp
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from megatronapp_common.scope.protocol_requests import CALLER_HEADER
from megatronapp_common.web.problems import HttpError
from megatronapp_operator.gateway.proxy.hub_addresses import hub_socket
from megatronapp_operator.gateway.proxy.response_policy import JSON, PLAIN, TOTAL_S, ResponseRule

LOG = logging.getLogger(__name__)
CHUNK_BYTES = 64 << 10
CONNECT_S, READ_S = 5.0, 30.0
AT_ONCE = 64
"""Connections to one hub; no hub takes from another's."""
SEND_S = 30.0
"""So long may a caller take no bytes."""
MAX_IDENTITY = 253
"""Maximum length of a name that a hub records."""
_MODEL_TOKEN = re.compile(r"[0-9]{1,10}")
"""Number of a token in a vocabulary, as in queries for lens and attribution; no token that logs in is so short."""
_HUB_LOG = "Check the log of the job's hub."


def new_session() -> aiohttp.ClientSession:
    """Connections to hubs: no cookies, no proxies of the environment, nothing unpacked."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, limit_per_host=AT_ONCE, socket_factory=lambda address: hub_socket(*address[:3])
        ),
        timeout=_timeout(TOTAL_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


def _timeout(total_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s, connect=CONNECT_S, sock_read=READ_S)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HubRequest:
    """A request to a hub."""

    url: URL
    token: str
    method: str = "GET"
    body: bytes | None = None
    who: str | None = None
    """The caller, for the hub's limits: by name if they control (for its record), by a pseudonym if they only read."""
    tag: str | None = None
    """Entity tag of what the caller has already."""
    kind: ResponseRule = PLAIN

    @property
    def headers(self) -> dict[str, str]:
        """All headers that the hub receives."""
        accept = ", ".join(sorted(self.kind.types))
        headers = {"Authorization": f"Bearer {self.token}", "Accept": accept, "Accept-Encoding": "identity"}
        headers |= {} if self.body is None else {"Content-Type": JSON}
        headers |= {} if self.who is None else {CALLER_HEADER: encode_caller_name(self.who)}
        return headers | ({} if self.tag is None else {"If-None-Match": self.tag})


def encode_caller_name(name: str) -> str:
    """A user's name as a header holds it: printable ASCII as it is, the rest by percent-encoding (RFC 3986)."""
    return urllib.parse.quote(name, safe="!#$&'()*+,/:;=?@[]|~ ", errors="replace").strip()[:MAX_IDENTITY]


def address_of(hub: str, path: str, query: str) -> URL:
    """The hub's URL for a path below `/api/v1/`. A token that logs in stays here; numbers of a model's tokens pass."""
    given = urllib.parse.parse_qsl(query, keep_blank_values=True)
    pairs = [(key, value) for key, value in given if key != "token" or _MODEL_TOKEN.fullmatch(value)]
    return URL(f"http://{hub}/api/v1/{path}" + (f"?{urllib.parse.urlencode(pairs)}" if pairs else ""), encoded=True)


async def send_request(session: aiohttp.ClientSession, question: HubRequest) -> "HubResponse":
    """The hub's answer, of which nothing has been read yet. Raises HttpError (502, 504) if it cannot be passed on."""
    try:
        answer = await session.request(
            question.method,
            question.url,
            headers=question.headers,
            data=question.body,
            allow_redirects=False,
            timeout=_timeout(question.kind.total_s),
        )
    except TimeoutError as error:
        raise HttpError(504, "hub-silent", "the job's hub did not answer in time", "Try again in a moment.") from error
    except (aiohttp.ClientError, ValueError, OSError) as error:
        text = f"the job's hub does not answer: {type(error).__name__}"
        raise HttpError(502, "hub-not-there", text, "It may be starting; try again in a moment.") from error
    wrong = find_response_problem(answer, question)
    if wrong is not None:
        answer.close()
        raise HttpError(502, "bad-hub", f"the job's hub answered with {wrong}", _HUB_LOG)
    return HubResponse(answer, question.kind)


def find_response_problem(answer: aiohttp.ClientResponse, question: HubRequest) -> str | None:
    """Why an answer must not be passed on."""
    status = answer.status
    if status == HTTPStatus.NOT_MODIFIED and question.tag is not None and question.kind.tagged:
        return None
    if not HTTPStatus.OK <= status < 600 or HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"status {status}"
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return f"status {status}: it belongs to another life of the job"
    return None if status == HTTPStatus.NO_CONTENT else _wrong_content(answer, question.kind)


def _wrong_content(answer: aiohttp.ClientResponse, kind: ResponseRule) -> str | None:
    if answer.content_type not in kind.types or "Content-Type" not in answer.headers:
        return "something that is not JSON" if kind is PLAIN else "something of another type"
    if answer.content_type != JSON and not answer.ok:
        return "an error that is not JSON"
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        return "compressed content"
    return f"more than {kind.most} bytes" if (answer.content_length or 0) > kind.most else None


class HubResponse(Response):
    """Streams the hub's body. Where that breaks off or is too long, so does ours, and the caller sees that it did."""

    def __init__(self, answer: aiohttp.ClientResponse, kind: ResponseRule) -> None:
        super().__init__(status_code=answer.status)
        self._answer = answer
        self._most = kind.most
        self._empty = answer.status in {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}
        self.share = contextlib.ExitStack()
        """Is given back when all is sent."""
        headers = kind.bare(answer.headers) if self._empty else kind.headers(answer.content_type, answer.headers)
        self.raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.share:
            async with self._answer:
                await self._send_all(send)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            if not self._empty:
                await self._stream(send)
        except (aiohttp.ClientError, TimeoutError, OSError, _ResponseTooLargeError) as error:
            LOG.warning("an answer of a hub broke off: %s", error or type(error).__name__)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, send: Send) -> None:
        total = 0
        async for chunk in self._answer.content.iter_chunked(CHUNK_BYTES):
            total += len(chunk)
            if total > self._most:
                raise _ResponseTooLargeError(f"it has more than {self._most} bytes")
            async with asyncio.timeout(SEND_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})


class _ResponseTooLargeError(Exception):
    """The hub sends without end."""
