"""Free ports, kept for the process that will listen on them."""

import contextlib
import random
import socket

from megatronapp_operator.errors import BackendError

PORTS = range(20000, 30000)
"""Below the range from which the kernel takes ports for outgoing connections (32768 by default)."""


class HeldPort:
    """A port bound but not listened on, so that nobody else takes it in the meantime.

    Linux lets a second socket bind the same address while none listens, if both set SO_REUSEADDR, as servers do. The
    port can stay held while its server lives, and comes back to it after a restart.
    """

    def __init__(self, address: str, number: int = 0) -> None:
        self.address = address
        self._socket = _bind(address, number) if number else _bind_free(address)
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()


def _bind_free(address: str) -> socket.socket:
    for number in random.sample(PORTS, k=200):
        with contextlib.suppress(BackendError):
            return _bind(address, number)
    raise BackendError(f"{address}: no free port between {PORTS.start} and {PORTS.stop - 1}; stop what listens there")


def _bind(address: str, number: int) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _probe(address, number)
        held.bind((address, number))
    except OSError as error:
        held.close()
        raise BackendError(f"{address}:{number}: cannot listen there: {error.strerror}; choose another port") from error
    return held


def _probe(address: str, number: int) -> None:
    """Raise OSError if the port is taken: without SO_REUSEADDR a port that somebody merely holds is refused, too."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, number))
