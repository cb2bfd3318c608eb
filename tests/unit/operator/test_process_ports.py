"""Ports that the process backend holds for its servers."""

import contextlib
import random
import socket

import pytest

from megatronapp_common.web.loopback import has_ipv6
from megatronapp_operator.backends.process import ports
from megatronapp_operator.errors import BackendError
from megatronapp_trainer.serve.app import listen


def test_a_reserved_port_is_refused_to_others_and_open_to_its_server() -> None:
    reserved = ports.ReservedPort("127.0.0.9")
    with pytest.raises(BackendError, match="cannot listen there"):
        ports.ReservedPort("127.0.0.9", reserved.number)
    with socket.create_server(("127.0.0.9", reserved.number)) as server:
        server.listen()
        with socket.create_connection(("127.0.0.9", reserved.number)):
            pass
    reserved.close()


@pytest.mark.parametrize(
    ("address", "host"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.9", "127.0.0.9"), ("::", "[::1]"), ("::1", "[::1]")],
)
def test_the_url_of_a_port_reaches_it_locally(address: str, host: str) -> None:
    if ":" in address and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    reserved = ports.ReservedPort(address)
    assert reserved.url == f"http://{host}:{reserved.number}"
    reserved.close()


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
    reserved = ports.ReservedPort("127.0.0.1", pages=True)
    for _ in range(2):
        with pytest.raises(OSError, match="in use"):
            server_at(address, reserved.number, socket.SO_REUSEADDR)
        with (
            server_at(address, reserved.number, socket.SO_REUSEADDR, socket.SO_REUSEPORT),
            socket.create_connection((address, reserved.number)),
        ):
            pass
    reserved.close()
    server_at(address, reserved.number, socket.SO_REUSEADDR).close()


def test_a_port_that_clients_send_keys_to_stays_ours_while_its_server_is_down() -> None:
    reserved = ports.ReservedPort("127.0.0.9", secrets=True)
    with pytest.raises(OSError, match="in use"):
        server_at("127.0.0.9", reserved.number, socket.SO_REUSEADDR)
    listen("127.0.0.9", reserved.number, reserved=True).close()
    reserved.close()


def server_at_v6_alone() -> socket.socket:
    """Listen at a port of [::1] that is free at 127.0.0.1, where connections that have ended keep theirs a minute."""
    while True:
        server = server_at("::1", 0)
        try:
            server_at("127.0.0.1", server.getsockname()[1]).close()
        except OSError:
            server.close()
        else:
            return server


def test_a_page_port_in_use_at_the_other_address_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_at_v6_alone() as stranger:
        taken = stranger.getsockname()[1]
        reserved = ports.ReservedPort("127.0.0.1", taken, pages=True)  # who names a port gets it
        assert reserved.number == taken
        reserved.close()
        others = [number for number in random.sample(ports.PORTS, 20) if number != taken]
        monkeypatch.setattr(random, "sample", lambda *_, **__: [taken, *others])
        reserved = ports.ReservedPort("127.0.0.1", pages=True)
        assert reserved.number in others
        reserved.close()
        monkeypatch.setattr(random, "sample", lambda *_, **__: [taken])
        reserved = ports.ReservedPort("127.0.0.1", pages=True)
        assert reserved.number == taken
        reserved.close()


def test_an_address_without_names_is_reserved_alone() -> None:
    for _ in range(10):
        reserved = ports.ReservedPort("127.0.0.9", pages=True)
        with contextlib.closing(reserved), contextlib.suppress(OSError):  # another program may have it there
            server_at("::1", reserved.number).close()
            return
    pytest.fail("ten ports in a row are taken")
