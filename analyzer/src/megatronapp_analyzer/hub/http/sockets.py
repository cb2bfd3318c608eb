"""Sockets on which a hub listens, and whether a name below `localhost` leads to them alone."""

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

from megatronapp_analyzer.errors import SettingsError
from megatronapp_common.web.bounded_http import STALL_S
from megatronapp_common.web.loopback import V4, V6, authority, has_ipv6, is_shared
from megatronapp_common.web.server import listen

TRIES = 64
"""Number of attempts to find a port that is free at both addresses."""


class HubSockets(NamedTuple):
    """Sockets that listen already, so that no other process can: connections wait until the hub accepts them."""

    sockets: tuple[socket.socket, ...]
    named: bool
    """True if every address that browsers try for a name below `localhost` belongs to this hub."""

    @property
    def url(self) -> str:
        """Return the address for users and programs."""
        return f"http://{authority(*self.sockets[0].getsockname()[:2])}"


@contextlib.contextmanager
def open_sockets(host: str, port: int) -> Iterator[HubSockets]:
    """Listen while the hub lives; at [::1], too, if `host` is 127.0.0.1. Raises SettingsError if the port is taken.

    With port 0 another one is tried where either address is taken.
    """
    found = _pair(port) if is_shared(host) else HubSockets((_listen(host, port),), named=False)
    try:
        yield found
    finally:
        for sock in found.sockets:
            sock.close()


def _pair(port: int) -> HubSockets:
    for _ in range(TRIES):
        first = _listen(V4, port)
        if not has_ipv6():
            return HubSockets((first,), named=True)
        try:
            return HubSockets((first, _listen(V6, first.getsockname()[1])), named=True)
        except SettingsError:
            if port:
                return HubSockets((first,), named=False)
            first.close()
    return HubSockets((_listen(V4, 0),), named=False)


def _listen(host: str, port: int) -> socket.socket:
    """Listen; a port that the same user holds for this hub is shared, which only SO_REUSEPORT allows.

    The kernel's buffer is not limited: frames of a step may have megabytes.
    """
    try:
        return listen(host, port, stall_s=STALL_S, buffer_bytes=None)
    except OSError:
        try:
            return listen(host, port, stall_s=STALL_S, buffer_bytes=None, reuse_port=True)
        except OSError as error:
            text = f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
            raise SettingsError(text) from error
