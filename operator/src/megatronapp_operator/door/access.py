"""What a request shows to prove who sends it: a Bearer token, or the cookie of a browser that is logged in.

Browsers send cookies to a host whatever the port, and with WebSocket handshakes of any page. So what a cookie opens and
changes something, or is a WebSocket, must come from a page of the door itself (Origin equals Host).
"""

import hashlib
import urllib.parse
from collections.abc import Mapping

from starlette.requests import HTTPConnection
from starlette.responses import Response

from megatronapp_operator.door.gate import Caller, Gate
from megatronapp_operator.door.problems import Refusal
from megatronapp_operator.door.sessions import LIFE_S, Sessions

READING = frozenset({"GET", "HEAD"})


def cookie_name(key: str) -> str:
    """Name of the cookie; differs per installation, because browsers share cookies between ports of one host."""
    return "megatronapp_door_" + hashlib.sha256(b"megatronapp:cookie:" + bytes.fromhex(key)).hexdigest()[:12]


def bearer(headers: Mapping[str, str]) -> str | None:
    """Token of an `Authorization: Bearer` header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return (token.strip() or None) if scheme.lower() == "bearer" else None


def same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a request comes from our own page, or from no page at all."""
    origin = headers.get("origin")
    return origin is None or urllib.parse.urlsplit(origin).netloc == headers.get("host")


def asked_here(headers: Mapping[str, str]) -> bool:
    """Whether a person or our own page opened an address, as far as the browser says; a link elsewhere did not."""
    return headers.get("sec-fetch-site", "none") in {"none", "same-origin"}


class Credentials:
    """Reads and writes what proves a caller."""

    def __init__(self, sessions: Sessions, *, cookie: str) -> None:
        self._sessions = sessions
        self._cookie = cookie

    def tokens(self, connection: HTTPConnection) -> tuple[str, ...]:
        """The tokens that stand behind a request. Raises Refusal (403) for a cookie that another page sent."""
        token = bearer(connection.headers)
        if token is not None:
            return (token,)
        tokens = self._sessions.tokens(self._word(connection))
        reads = connection.scope["type"] == "http" and connection.scope["method"] in READING
        if tokens and not reads and not same_origin(connection.headers):
            hint = "Open the page at the address that `megatronapp ui` prints."
            raise Refusal(403, "other-origin", "this request comes from a page that is not the door's", hint)
        return tokens

    def ticket(self, connection: HTTPConnection, caller: Caller) -> str:
        """A word that logs a browser in once."""
        return self._sessions.ticket(self.tokens(connection), whose=caller.identity)

    async def log_in(self, connection: HTTPConnection, shown: str, response: Response, *, gate: Gate) -> Response:
        """Set the cookie for a token or ticket. Raises Refusal (401) for one that opens nothing; ApiError."""
        tokens = self._sessions.redeem(shown) or ((shown,) if shown else ())
        caller = await gate.identify(tokens)
        word = self._sessions.log_in(tokens, whose=caller.identity, before=self._word(connection))
        secure = "https" in (connection.url.scheme, connection.headers.get("x-forwarded-proto"))
        response.set_cookie(
            self._cookie, word, max_age=int(LIFE_S), httponly=True, samesite="strict", secure=secure, path="/"
        )
        return response

    def log_out(self, connection: HTTPConnection, response: Response) -> Response:
        """Forget the browser."""
        self._sessions.log_out(self._word(connection))
        response.delete_cookie(self._cookie, path="/")
        return response

    def _word(self, connection: HTTPConnection) -> str:
        return connection.cookies.get(self._cookie, "")
