"""IPv4 addresses and ports of a worker."""

import contextlib
import ipaddress
import random
import socket
from collections.abc import Iterator

from megatronapp_common.names import Env
from megatronapp_trainer.errors import RendezvousError, UsageError
from megatronapp_trainer.launch.config.settings import Endpoint

PORTS = range(20000, 30000)
"""Range below the one from which the kernel assigns ports to outgoing connections (32768 and up by default)."""
TRIES = 200


def require_ipv4(text: str) -> str:
    """Return the address unchanged.

    Raises UsageError if it is not an IPv4 address.
    """
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        kind = "an IPv6 address" if ":" in text else "not an IPv4 address"
        raise UsageError(f"{text!r} is {kind}; set {Env.ADDRESS} to the worker's IPv4 address") from None
    return text


def resolve_ipv4(host: str) -> str:
    """Resolve a name to its first IPv4 address, without a cache.

    Raises OSError if the name has no address now.
    """
    found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def own_address(given: str | None, host_name: str) -> str:
    """Return the address that the backend gave, or the one of the host name.

    Raises RendezvousError if the host name has no IPv4 address.
    """
    if given is not None:
        return require_ipv4(given)
    try:
        return resolve_ipv4(host_name)
    except OSError as error:
        raise RendezvousError(
            f"the host name {host_name} has no IPv4 address ({error.strerror}); set {Env.ADDRESS}"
        ) from error


@contextlib.contextmanager
def reserved_port(address: str) -> Iterator[int]:
    """Reserve a TCP port that is free at every address of this node, for torch's store, which listens at each of them.

    The port is bound here, but nothing listens on it. Linux lets a second socket bind it and listen if both set
    SO_REUSEADDR, as torch's store does; a process that searches for a free port finds it in use. The option is set
    after binding, because a socket that has it before could also bind a port that another process has just reserved.

    Raises:
        RendezvousError: `address` is not one of this node's, or no port is free.
    """
    _require_own(address)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        for port in random.sample(PORTS, k=TRIES):
            with contextlib.suppress(OSError):
                listener.bind(("", port))
                break
        else:
            raise RendezvousError(
                f"{TRIES} ports tried from {PORTS.start} to {PORTS.stop - 1} are all in use; stop what uses them"
            )
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield port


def _require_own(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise RendezvousError(f"{address} is not an address of this node: {error.strerror}") from error


def listening_socket(endpoint: Endpoint, address: str) -> socket.socket:
    """Listen at this worker's own address.

    Raises RendezvousError if the port is taken.
    """
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((address, endpoint.port))
        server.listen(socket.SOMAXCONN)
    except OSError as error:
        server.close()
        raise RendezvousError(
            f"worker 0 cannot listen at {address}:{endpoint.port}: {error.strerror}; "
            f"free the port or set {Env.COORDINATOR} to another one"
        ) from error
    return server


def keep_alive(connection: socket.socket) -> None:
    """Detect within half a minute that the node at the other end has vanished without closing the connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
