"""Ports and addresses of a launcher."""

import contextlib
import socket

import pytest

from megatronapp_trainer.errors import RendezvousError, UsageError
from megatronapp_trainer.launch.config import address

HOST = "127.0.0.2"


def listens(host: str, port: int) -> socket.socket:
    """A server as anyone writes it, asyncio and libuv included."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, port))
    server.listen()
    return server


def test_the_port_for_torch_is_free_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with address.reserved_port(HOST) as port:
        assert port < 32768  # not one that an outgoing connection may take
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.9", port))
        listens("0.0.0.0", port).close()  # as the store does while the port is held
    monkeypatch.setattr(address, "PORTS", range(port, port + 1))
    monkeypatch.setattr(address, "TRIES", 1)
    with (
        listens("127.0.0.9", port),
        pytest.raises(RendezvousError, match="are all in use"),
        address.reserved_port(HOST) as other,
    ):
        pytest.fail(f"took port {other}, where torch's store could not listen at all addresses")


def test_addresses_of_others_are_refused() -> None:
    with (
        pytest.raises(RendezvousError, match=r"192.0.2.1 is not an address of this node"),
        address.reserved_port("192.0.2.1"),
    ):
        pytest.fail("held a port of another machine")
    with pytest.raises(UsageError, match="IPv6"):
        address.own_address("fe80::2", "unused")


def test_a_port_is_reserved_without_a_moment_in_which_another_may_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with address.reserved_port(HOST) as port:
        pass
    monkeypatch.setattr(address, "PORTS", range(port, port + 1))
    monkeypatch.setattr(address, "TRIES", 1)
    rivals: list[socket.socket] = []
    reserving = contextlib.ExitStack()

    class Contended(socket.socket):
        """Socket whose port another process takes as soon as it is closed."""

        def close(self) -> None:
            number = self.getsockname()[1] if self.fileno() >= 0 else None
            super().close()
            if number == port:
                rivals.append(listens("0.0.0.0", port))

    with monkeypatch.context() as patch, reserving:
        patch.setattr(socket, "socket", Contended)
        reserving.enter_context(address.reserved_port(HOST))
        assert not rivals
    for rival in rivals:
        rival.close()
