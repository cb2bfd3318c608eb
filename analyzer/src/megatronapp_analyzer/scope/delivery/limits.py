"""Limits of what one caller, and all callers together, may use of MegaScope."""

from starlette.requests import HTTPConnection

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_common.scope.protocol_requests import CALLER_HEADER
from megatronapp_common.web.problems import HttpError
from megatronapp_common.web.roles import role_of
from megatronapp_common.web.token_bucket import BucketSize

REQUESTS = BucketSize(burst=400, per_s=200)
"""Requests of one caller: a page that opens requests many tiles."""
MAX_CALLERS = 1024
"""Callers with a limit of their own; beyond, the one that was seen longest ago starts afresh."""
HUB = "the hub"
"""Key of what all callers share."""
MAX_PAGES = 64
"""Sockets of pages at a time."""


def caller_of(connection: HTTPConnection) -> str:
    """Return the caller whose limit a request uses: the name that the gateway sends, or the address of the client."""
    host = connection.client.host if connection.client else ""
    return f"{role_of(connection).value} {connection.headers.get(CALLER_HEADER, host)[:253]}"


def too_many_pages(_: str, limit: int) -> ProtocolError:
    """Return the error for a page beyond MAX_PAGES."""
    return ProtocolError("too-many-pages", f"{limit} pages look already", "Close one, and connect again.")


def too_fast(retry_s: int) -> HttpError:
    """Return the error for a request beyond REQUESTS."""
    text = f"more than {REQUESTS.per_s:.0f} requests in a second"
    return HttpError(429, "too-many-requests", text, "Ask less often.", retry_s=retry_s)
