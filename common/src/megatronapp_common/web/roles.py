"""The role of a request, which the guard in front of all routes has proven, and dependencies of routes."""

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from starlette.requests import HTTPConnection

from megatronapp_common.web.tokens import TokenRole

T = TypeVar("T")
ROLE = "megatronapp.role"
"""Key of an ASGI scope."""


def role_of(connection: HTTPConnection) -> TokenRole:
    """Return the proven role: viewer or controller."""
    return cast(TokenRole, connection.scope[ROLE])


def direct(find: Callable[[HTTPConnection], T]) -> Callable[[HTTPConnection], Awaitable[T]]:
    """A dependency that FastAPI calls at once: plain functions it gives to threads, and a request waits for each."""

    async def found(connection: HTTPConnection) -> T:
        return find(connection)

    return found
