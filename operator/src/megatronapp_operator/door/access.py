"""What a request shows to prove who sends it: a Bearer token, or the cookie of a browser that is logged in.

Browsers send cookies to a host whatever the port, and with WebSocket handshakes of any page. So what a cookie opens
must come from a page of the door itself: what only reads by what the browser says of its page (Sec-Fetch-Site), the
rest by Origin, which must equal Host. And a forwarded port is opened under a host name of its own (see `own_host`).
"""

import hashlib
import ipaddress
import re
import secrets
import urllib.parse
from collections.abc import Mapping

from starlette.requests import HTTPConnection
from starlette.responses import Response

from megatronapp_operator.door.gate import Caller, Gate
from megatronapp_operator.door.problems import Refusal
from megatronapp_operator.door.sessions import LIFE_S, Sessions

READING = frozenset({"GET", "HEAD"})
TLS = frozenset({"https", "wss"})


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
    return origin is None or re.sub("^https?://", "", origin) == headers.get("host")


def asked_here(headers: Mapping[str, str]) -> bool:
    """Whether a person or our own page opened an address, as far as the browser says; a link elsewhere did not."""
    return headers.get("sec-fetch-site", "none") in {"none", "same-origin"}


def own_host(host: str | None) -> str | None:
    """A fresh name for this machine in place of its own; None where `host` is another, or has a name already.

    A cookie of 127.0.0.1 goes to all servers of the machine, whatever their port: to another forward, or to what
    anybody else runs there. Browsers resolve names below `localhost` by themselves, and a cookie stays with its name.
    """
    try:
        url = urllib.parse.urlsplit(f"//{host or ''}")
        if not (url.hostname == "localhost" or ipaddress.ip_address(url.hostname or "").is_loopback):
            return None
        port = "" if url.port is None else f":{url.port}"
    except ValueError:
        return None
    return f"door-{secrets.token_hex(8)}.localhost{port}"


def opens_page(headers: Mapping[str, str]) -> bool:
    """Whether a browser loads a document, and is none that finds no names below `localhost`, as WebKit's (Safari)."""
    agent = headers.get("user-agent", "")
    webkit = "Safari/" in agent and "Chrome/" not in agent
    loads = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return loads and not webkit


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
        if tokens and not (asked_here(connection.headers) and (reads or same_origin(connection.headers))):
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
        """Forget the browser."""
        self._sessions.log_out(self._word(connection))
        response.delete_cookie(self._name(connection), path="/", secure=_secure(connection))
        return response

    def _word(self, connection: HTTPConnection) -> str:
        return connection.cookies.get(self._name(connection), "")

    def _name(self, connection: HTTPConnection) -> str:
        """Over TLS with the prefix by which a browser takes it from this very host only (RFC 6265bis)."""
        return f"__Host-{self._cookie}" if _secure(connection) else self._cookie


def _secure(connection: HTTPConnection) -> bool:
    """Whether the browser speaks TLS, to us or to the first proxy; some write "wss" of WebSockets."""
    told = connection.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return not TLS.isdisjoint((connection.url.scheme, told))
