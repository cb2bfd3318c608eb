"""Ports for servers that tests start as processes and that must know their port beforehand."""

import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import Iterator

BELOW_EPHEMERAL = range(10_000, 20_000)
"""Below the ports that Linux gives to outgoing connections (32768), jobs (see backends/process/ports.py) and gangs."""


def own_addresses() -> Iterator[str]:
    """Yield addresses of loopback at which no other process of tests listens, for servers whose port is fixed."""
    number = os.getpid() % 62_500
    return (f"127.{100 + count}.{number // 250}.{1 + number % 250}" for count in itertools.count())


@contextlib.contextmanager
def reserved_ports(count: int, address: str = "127.0.0.1") -> Iterator[list[int]]:
    """Hold `count` free ports of an address until the block ends.

    Each is bound and not listened on. Linux lets a second socket bind and listen if both set SO_REUSEADDR, as servers
    in Go, uvicorn and torch's store do, so that no other test is given the port between its choice and its use.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(found) < count:
            port = BELOW_EPHEMERAL.start + secrets.randbelow(len(BELOW_EPHEMERAL))
            with contextlib.ExitStack() as attempt, contextlib.suppress(OSError):
                sock = attempt.enter_context(socket.socket())
                sock.bind((address, port))  # without SO_REUSEADDR: refused where another test holds it
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                stack.push(attempt.pop_all())
                found.append(port)
        yield found
