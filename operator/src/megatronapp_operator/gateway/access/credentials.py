"""Credentials of a request: a Bearer token, or the cookie of a browser that is logged in.

A request with a cookie must be sent by a page of the gateway itself, and `megatronapp ui` opens a forwarded port under
a separate host name (see `megatronapp_common.web.origin`). The gateway itself redirects to no such name: it cannot know
which other process next to the browser answers to it.
"""

import hashlib

from starlette.requests import HTTPConnection
from starlette.responses import Response

from megatronapp_common.web.origin import READING, bearer_token, is_own_page
from megatronapp_common.web.problems import HttpError
from megatronapp_operator.gateway.access.authorization import LOG_IN, Authorizer, Caller
from megatronapp_operator.gateway.access.sessions import LIFE_S, BrowserSessions

TLS = frozenset({"https", "wss"})


def cookie_name(key: str) -> str:
    """Name of the cookie; differs per installation, because browsers share cookies between ports of one host."""
    return "megatronapp_gateway_" + hashlib.sha256(b"megatronapp:cookie:" + bytes.fromhex(key)).hexdigest()[:12]


class Credentials:
    """Reads and writes what proves a caller."""

    def __init__(self, sessions: BrowserSessions, *, cookie: str) -> None:
        self._sessions = sessions
        self._cookie = cookie

    def tokens(self, connection: HTTPConnection) -> tuple[str, ...]:
        """Return the tokens of a request. Raises HttpError (403) for a cookie that another page sent."""
        token = bearer_token(connection.headers)
        if token is not None:
            return (token,)
        tokens = self._sessions.tokens(self._cookie_value(connection))
        reads = connection.scope["type"] == "http" and connection.scope["method"] in READING
        if tokens and not is_own_page(connection.headers, reads=reads):
            hint = "Open the page at the address that `megatronapp ui` prints."
            raise HttpError(403, "other-origin", "this request was sent by a page that is not the gateway's", hint)
        return tokens

    def ticket(self, connection: HTTPConnection, caller: Caller) -> str:
        """A word that logs a browser in once."""
        return self._sessions.ticket(self.tokens(connection), whose=caller.identity)

    async def log_in(self, connection: HTTPConnection, shown: str, response: Response, *, gate: Authorizer) -> Response:
        """Set the cookie for a token or ticket. Raises HttpError (401) for one that opens nothing; ApiError."""
        behind = self._sessions.tokens_of_ticket(shown)
        tokens = behind or ((shown,) if shown else ())
        caller = await gate.identify(tokens)  # a cluster that does not answer uses no ticket up
        if behind and not self._sessions.redeem(shown):
            raise HttpError(401, "log-in", "this ticket was used in the meantime", LOG_IN)
        word = self._sessions.log_in(tokens, whose=caller.identity, before=self._cookie_value(connection))
        response.set_cookie(
            self._name(connection),
            word,
            max_age=int(LIFE_S),
            httponly=True,
            samesite="strict",
            secure=_secure(connection),
            path="/",
        )
        return response

    def log_out(self, connection: HTTPConnection, response: Response) -> Response:
        """Log the browser out."""
        self._sessions.log_out(self._cookie_value(connection))
        response.delete_cookie(self._name(connection), path="/", secure=_secure(connection))
        return response

    def _cookie_value(self, connection: HTTPConnection) -> str:
        return connection.cookies.get(self._name(connection), "")

    def _name(self, connection: HTTPConnection) -> str:
        """Over TLS with the prefix by which a browser takes it from this very host only (RFC 6265bis)."""
        return f"__Host-{self._cookie}" if _secure(connection) else self._cookie


def _secure(connection: HTTPConnection) -> bool:
    """Return True if the browser uses TLS, to us or to the first proxy; some proxies write "wss" for WebSockets."""
    told = connection.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return not TLS.isdisjoint((connection.url.scheme, told))
