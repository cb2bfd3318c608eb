"""Addresses at which a hub listens, and when its page may have a name below `localhost`."""

import contextlib
import socket

import pytest
from fastapi import FastAPI
from ports import reserved_ports

from megatronapp_analyzer.errors import SettingsError
from megatronapp_analyzer.hub.http import sockets
from megatronapp_analyzer.hub.http.server import MAX_MESSAGE_BYTES, build_server
from megatronapp_analyzer.hub.http.sockets import open_sockets
from megatronapp_common.web.bounded_http import BoundedHttpProtocol


def stranger(address: str, port: int) -> socket.socket:
    """Open a socket as another process of this machine does, which takes any port that Linux gives."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_both_loopback_addresses_of_a_named_hub_are_reserved(host: str) -> None:
    with open_sockets(host, 0) as found:
        assert found.named
        port = found.sockets[0].getsockname()[1]
        assert found.url == f"http://127.0.0.1:{port}"
        for address in ("127.0.0.1", "::1"):
            with pytest.raises(OSError, match="in use"):
                stranger(address, port)
            socket.create_connection((address, port)).close()
    for address in ("127.0.0.1", "::1"):
        stranger(address, port).close()


def test_a_port_in_use_at_the_other_address_gives_no_name() -> None:
    with reserved_ports(1) as (port,), stranger("::1", port), open_sockets("127.0.0.1", port) as found:
        assert not found.named
        assert [sock.getsockname()[:2] for sock in found.sockets] == [("127.0.0.1", port)]


def test_a_hub_without_a_configured_port_picks_a_port_free_at_both_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    listen, others = sockets._listen, contextlib.ExitStack()
    seized: list[int] = []

    def quick(host: str, port: int) -> socket.socket:
        """A stranger is faster at [::1], twice."""
        if host == "::1" and len(seized) < 2:
            others.enter_context(stranger(host, port))
            seized.append(port)
        return listen(host, port)

    monkeypatch.setattr(sockets, "_listen", quick)
    with others, open_sockets("127.0.0.1", 0) as found:
        assert found.named
        assert len(seized) == 2
        assert found.sockets[1].getsockname()[1] == found.sockets[0].getsockname()[1]
        assert found.sockets[0].getsockname()[1] not in seized


def test_a_host_without_ipv6_still_gives_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "has_ipv6", lambda: False)
    with open_sockets("127.0.0.1", 0) as found:
        assert (len(found.sockets), found.named) == (1, True)


@pytest.mark.parametrize(("host", "url"), [("127.0.0.5", "http://127.0.0.5:"), ("::1", "http://[::1]:")])
def test_an_address_without_names_is_listened_on_alone(host: str, url: str) -> None:
    with open_sockets(host, 0) as found:
        assert (len(found.sockets), found.named) == (1, False)
        assert found.url.startswith(url)


def test_a_port_in_use_is_reported() -> None:
    with (
        stranger("127.0.0.1", 0) as other,
        pytest.raises(SettingsError, match="choose another --port"),
        open_sockets("127.0.0.1", other.getsockname()[1]),
    ):
        pass


def test_two_hubs_cannot_listen_on_the_same_port() -> None:
    with (
        open_sockets("127.0.0.1", 0) as first,
        pytest.raises(SettingsError, match="cannot listen"),
        open_sockets("127.0.0.1", first.sockets[0].getsockname()[1]),
    ):
        pass


def test_a_hub_can_listen_on_a_port_reserved_for_it() -> None:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        for _ in range(2):
            with open_sockets("127.0.0.1", reserved.getsockname()[1]) as found:
                assert found.named


def test_no_peer_of_a_hub_holds_a_connection_for_nothing() -> None:
    config = build_server(FastAPI()).config
    config.load()
    assert issubclass(config.http_protocol_class, BoundedHttpProtocol)
    assert config.http_protocol_class.by_progress, "a slow link takes minutes for a trace"
    assert config.ws_max_size == MAX_MESSAGE_BYTES
