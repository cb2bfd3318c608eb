"""Checks of where a browser's request originates, and names under which a forwarded port is opened.

Browsers send cookies to a host on any port, and with WebSocket handshakes of any page. So a request that is allowed by
a cookie must originate from a page of the server itself: one that only reads is judged by Sec-Fetch-Site, which the
browser sets, the rest by Origin, which must equal Host.
"""

import re
import secrets
import urllib.parse
from collections.abc import Mapping

READING = frozenset({"GET", "HEAD"})
"""Methods that change nothing."""
_SHARED = frozenset({"localhost", "127.0.0.1", "::1"})
"""Hosts that a name below `localhost` can replace; it leads to no other address, say 127.0.0.5."""


def bearer_token(headers: Mapping[str, str]) -> str | None:
    """Return the token of an `Authorization: Bearer` header."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return (token.strip() or None) if scheme.lower() == "bearer" else None


def is_same_origin(headers: Mapping[str, str]) -> bool:
    """Return true if a request originates from our own page, or from no page."""
    origin = headers.get("origin")
    return origin is None or re.sub("^https?://", "", origin) == headers.get("host")


def is_same_site_navigation(headers: Mapping[str, str]) -> bool:
    """Return true if a user or our own page opened an address, according to the browser; false for a link elsewhere."""
    return headers.get("sec-fetch-site", "none") in {"none", "same-origin"}


def is_own_page(headers: Mapping[str, str], *, reads: bool) -> bool:
    """Return true if a request that a cookie allows may be from our own page; `reads`: it changes nothing."""
    return is_same_site_navigation(headers) and (reads or is_same_origin(headers))


def loopback_alias(host: str | None, kind: str) -> str | None:
    """Return a fresh name for this machine; None if `host` is another machine, or has such a name already.

    A cookie of 127.0.0.1 is sent to all servers of the machine, on any port: to another forward, or to a server of
    another user. Browsers resolve names below `localhost` by themselves, and a cookie stays with its name. But they
    try [::1] before 127.0.0.1: only a server that holds both (see `loopback`) may lead a browser to a name.
    """
    try:
        url = urllib.parse.urlsplit(f"//{host or ''}")
        if url.hostname not in _SHARED:
            return None
        port = "" if url.port is None else f":{url.port}"
    except ValueError:
        return None
    return f"{kind}-{secrets.token_hex(8)}.localhost{port}"


def can_open_localhost_name(headers: Mapping[str, str]) -> bool:
    """Return true if a browser loads a document and resolves names below `localhost`, as WebKit's (Safari) does not."""
    agent = headers.get("user-agent", "")
    webkit = "Safari/" in agent and "Chrome/" not in agent
    loads = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return loads and not webkit
