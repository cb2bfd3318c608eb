"""The sockets on which a hub listens, and whether a name below `localhost` leads to them alone."""

import contextlib
import socket
from collections.abc import Iterator
from typing import NamedTuple

from megatronapp_analyzer.errors import SettingsError
from megatronapp_common.web.loopback import V4, V6, family_of, has_ipv6, is_shared
from megatronapp_common.web.tcp_nodelay import set_tcp_nodelay

BACKLOG = 2048
STALL_S = 30.0
"""A peer that takes no byte for so long is gone: what was written, and is closed here, would wait for it for ever."""
TRIES = 64
"""For a port that is free at both addresses."""


class HubSockets(NamedTuple):
    """Sockets that listen already, so that nobody else can: connections wait until the hub takes them."""

    sockets: tuple[socket.socket, ...]
    named: bool
    """Whether every address at which browsers look for a name below `localhost` is ours."""

    @property
    def url(self) -> str:
        """Where people and programs find it."""
        host, port = self.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
    """A second time for a port that the same user holds for this hub: such a socket shares it by SO_REUSEPORT only."""
    try:
        return _bound(host, port, socket.SO_REUSEADDR)
    except OSError:
        try:
            return _bound(host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
        except OSError as error:
            text = f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
            raise SettingsError(text) from error


def _bound(host: str, port: int, *options: int) -> socket.socket:
    sock = socket.socket(family_of(host), socket.SOCK_STREAM)
    set_tcp_nodelay(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
    try:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock
