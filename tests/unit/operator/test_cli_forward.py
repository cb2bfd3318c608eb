"""The port that `megatronapp` forwards: its page has a name only where all addresses of the name lead to it."""

import contextlib
import errno
import importlib.metadata
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from megatronapp_common import cli
from megatronapp_common.names import GATEWAY_PORT
from megatronapp_operator.cli.cluster import port_forward
from megatronapp_operator.cli.cluster.gateway_client import GatewayEndpoint
from megatronapp_operator.cli.cluster.port_forward import ForwardedPort
from megatronapp_operator.controller import settings


@contextlib.contextmanager
def listening() -> Iterator[ForwardedPort]:
    """Listen as a forwarded port does."""
    listeners, named = port_forward._listen()
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        yield ForwardedPort(listeners[0].getsockname()[1], named)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ports of [::1] that another program takes: as many as the length of the list says."""
    taken: list[int] = []
    create = socket.create_server

    def create_server(address: tuple[str, int], **options: Any) -> socket.socket:
        if address[0] == "::1" and taken:
            raise OSError(errno.EADDRINUSE, f"port {taken.pop()} is taken")
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", create_server)
    return taken


def test_a_port_that_is_ours_at_all_addresses_is_opened_under_a_fresh_name() -> None:
    with listening() as forward:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, forward.port)).close()
    endpoint = GatewayEndpoint(f"http://127.0.0.1:{forward.port}", forward)
    pages = {endpoint.page for _ in range(4)}
    assert len(pages) == 4
    assert all(re.fullmatch(rf"http://gateway-[0-9a-f]{{16}}\.localhost:{forward.port}", page) for page in pages)


def test_the_port_without_tls_is_forwarded_in_any_order() -> None:
    http, https = {"name": "http", "port": 80}, {"name": "https", "port": 443}
    assert port_forward.page_port({"ports": [https, http]}) == http
    assert port_forward.page_port({"ports": [{"port": 8080}]}) == {"port": 8080}
    assert port_forward.page_port({})["port"] == GATEWAY_PORT


def test_another_port_is_chosen_if_the_other_address_is_in_use(taken: list[int]) -> None:
    taken += [0] * (port_forward.TRIES - 1)
    with listening() as forward:
        assert forward.named
        socket.create_connection(("::1", forward.port)).close()


def test_a_port_that_is_not_ours_at_all_addresses_has_no_name(taken: list[int]) -> None:
    taken += [0] * 99
    with listening() as forward:
        socket.create_connection(("127.0.0.1", forward.port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("::1", forward.port))
    assert not forward.named
    assert GatewayEndpoint(f"http://127.0.0.1:{forward.port}", forward).page == f"http://127.0.0.1:{forward.port}"


def test_a_port_forwarded_by_another_process_stays_an_address() -> None:
    assert GatewayEndpoint("http://127.0.0.1:8080").page == "http://127.0.0.1:8080"


@pytest.mark.parametrize("argv", [("ui", "--door"), ("ui", "demo", "--door=a/b"), ("inject", "--door", "a/b")])
def test_the_former_flag_is_answered(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.build_parser(importlib.metadata.entry_points(group="megatronapp.commands"))
    with pytest.raises(SystemExit) as end:
        parser.parse_args(argv)
    assert end.value.code == 2
    assert "error: --door is named --gateway now\n" in capsys.readouterr().err


def test_the_operators_former_flag_is_answered_with_the_new_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.build_parser().parse_args(["--door-labels", "a=b"])
    assert "--door-labels is named --gateway-labels now" in capsys.readouterr().err
    assert "door" not in settings.build_parser().format_help()
