"""Ports that the process backend holds for its servers."""

import random
import socket

import pytest

from megatronapp_operator.backends.process import ports
from megatronapp_operator.errors import BackendError


def test_a_held_port_is_refused_to_strangers_and_open_to_its_server() -> None:
    held = ports.ReservedPort("127.0.0.9")
    with pytest.raises(BackendError, match="cannot listen there"):
        ports.ReservedPort("127.0.0.9", held.number)
    with socket.create_server(("127.0.0.9", held.number)) as server:
        server.listen()
        with socket.create_connection(("127.0.0.9", held.number)):
            pass
    held.close()


def server_at(address: str, number: int, *options: int) -> socket.socket:
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        for option in options:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind((address, number))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_of_pages_stays_ours_while_its_server_is_down(address: str) -> None:
    held = ports.ReservedPort("127.0.0.1", pages=True)
    for _ in range(2):
        with pytest.raises(OSError, match="in use"):
            server_at(address, held.number, socket.SO_REUSEADDR)
        with (
            server_at(address, held.number, socket.SO_REUSEADDR, socket.SO_REUSEPORT),
            socket.create_connection((address, held.number)),
        ):
            pass
    held.close()
    server_at(address, held.number, socket.SO_REUSEADDR).close()


def test_pages_take_another_port_where_somebody_has_it_at_the_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_at("::1", 0) as stranger:
        taken = stranger.getsockname()[1]
        held = ports.ReservedPort("127.0.0.1", taken, pages=True)  # who names a port gets it
        assert held.number == taken
        held.close()
        others = [one for one in random.sample(ports.PORTS, 20) if one != taken]
        monkeypatch.setattr(random, "sample", lambda *_, **__: [taken, *others])
        held = ports.ReservedPort("127.0.0.1", pages=True)
        assert held.number in others
        held.close()
        monkeypatch.setattr(random, "sample", lambda *_, **__: [taken])
        held = ports.ReservedPort("127.0.0.1", pages=True)
        assert held.number == taken
        held.close()


def test_an_address_without_names_is_held_alone() -> None:
    held = ports.ReservedPort("127.0.0.9", pages=True)
    server_at("::1", held.number).close()
    held.close()
