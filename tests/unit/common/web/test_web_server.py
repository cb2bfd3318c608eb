"""Sockets and settings of all servers, and what the parts of the web stack need."""

import socket
import subprocess
import sys

import pytest
from starlette.applications import Starlette

from megatronapp_common.web.server import listen, server_config

LONGER_S = 120.0
"""Than any connection may wait here."""


def test_the_end_of_an_answer_does_not_wait_for_the_peer() -> None:
    with (
        listen("127.0.0.1", 0, stall_s=30) as sock,
        socket.create_connection(sock.getsockname()),
        sock.accept()[0] as taken,
    ):
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("buffer_bytes", [None, 1 << 16])
def test_a_connection_whose_peer_takes_nothing_ends_by_itself(buffer_bytes: int | None) -> None:
    with (
        listen("127.0.0.1", 0, stall_s=0.2, buffer_bytes=buffer_bytes) as sock,
        socket.create_connection(sock.getsockname()),
        sock.accept()[0] as taken,
    ):
        assert buffer_bytes is None or taken.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * buffer_bytes
        taken.settimeout(LONGER_S)
        with pytest.raises(TimeoutError, match="Connection timed out"):
            taken.sendall(bytes(64 << 20))


def test_a_port_has_two_sockets_only_where_both_permit_it() -> None:
    with listen("127.0.0.1", 0, stall_s=30) as first, pytest.raises(OSError, match="Address already in use"):
        listen("127.0.0.1", first.getsockname()[1], stall_s=30, reuse_port=True)
    with listen("127.0.0.1", 0, stall_s=30, reuse_port=True) as first:
        listen("127.0.0.1", first.getsockname()[1], stall_s=30, reuse_port=True).close()


def test_no_server_trusts_headers_of_a_proxy_or_logs_addresses() -> None:
    config = server_config(Starlette(), shutdown_s=3)
    assert (config.proxy_headers, config.access_log, config.server_header) == (False, False, False)


def test_a_server_of_http_needs_no_package_for_websockets() -> None:
    code = "import sys; sys.modules['websockets'] = None; import megatronapp_common.web.bounded_http"
    subprocess.run([sys.executable, "-c", code], check=True)
