"""Free ports, reserved for the process that will listen on them."""

import contextlib
import random
import socket
from collections.abc import Iterator

from megatronapp_common.web.loopback import V4, V6, authority, family_of, has_ipv6, is_shared
from megatronapp_operator.errors import BackendError

PORTS = range(20000, 30000)
"""Ports below the range that the kernel uses for outgoing connections (from 32768 by default)."""

_EVERYWHERE = {"0.0.0.0": V4, "::": V6}
"""Address at which this machine reaches a server that listens on every address of a family."""


class ReservedPort:
    """Port that is bound but not listened on, so that no other process takes it in the meantime.

    Linux lets a second socket bind the same address while none listens, if both set SO_REUSEADDR, as servers do. The
    port can stay reserved while its server lives, and is still there for it after a restart.
    """

    def __init__(self, address: str, number: int = 0, *, pages: bool = False, secrets: bool = False) -> None:
        """Bind `number`, or (0) a free port. Raises BackendError.

        With `secrets` clients send a key to this port, which another user who listens while the server is down would
        get. Then the server must set SO_REUSEPORT, which Linux lets only sockets of one user share. So it must with
        `pages`, where browsers have logins. If `address` is 127.0.0.1, a port of pages is reserved at [::1], too,
        because browsers resolve names below `localhost` to it; a given `number` that is in use at [::1] is reserved
        without it.
        """
        self.address = address
        self._option = socket.SO_REUSEPORT if pages or secrets else socket.SO_REUSEADDR
        self._other_addresses = (V6,) if pages and is_shared(address) and has_ipv6() else ()
        self._sockets = self._bind(number) if number else self._bind_free()
        self.number = int(self._sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """URL of the port for this machine."""
        return f"http://{authority(_EVERYWHERE.get(self.address, self.address), self.number)}"

    def close(self) -> None:
        """Release the port, so that other programs can use it."""
        for reserved in self._sockets:
            reserved.close()

    def _bind(self, number: int) -> list[socket.socket]:
        reserved = [_bound(self.address, number, self._option)]
        for address in self._other_addresses:
            with contextlib.suppress(BackendError):
                reserved.append(_bound(address, number, self._option))
        return reserved

    def _bind_free(self) -> list[socket.socket]:
        """Bind a port that is free on all addresses; if no port is, one that is free on the first."""
        second = None
        for reserved in self._samples():
            if len(reserved) > len(self._other_addresses):
                _close(second)
                return reserved
            _close(reserved if second is not None else None)
            second = second or reserved
        if second is None:
            text = f"no free port between {PORTS.start} and {PORTS.stop - 1}; stop a program that listens there"
            raise BackendError(f"{self.address}: {text}")
        return second

    def _samples(self) -> Iterator[list[socket.socket]]:
        for number in random.sample(PORTS, k=200):
            with contextlib.suppress(BackendError):
                yield self._bind(number)


def _close(reserved: list[socket.socket] | None) -> None:
    for reserved_socket in reserved or ():
        reserved_socket.close()


def _bound(address: str, number: int, option: int) -> socket.socket:
    """Bind a port that no socket has, and let the server that is meant bind it, too.

    The option is set after binding: a socket that has it before could share a port that another process has reserved.
    """
    reserved = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        reserved.bind((address, number))
    except OSError as error:
        reserved.close()
        raise BackendError(f"{address}:{number}: cannot listen there: {error.strerror}; choose another port") from error
    reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    return reserved
