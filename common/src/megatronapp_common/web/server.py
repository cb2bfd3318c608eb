"""Settings that all servers share: listening sockets, and uvicorn."""

import logging
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from megatronapp_common.web.loopback import family_of

BACKLOG = 2048
KERNEL_BYTES = 128 << 10
"""Limit of the kernel's buffer of a connection in one direction (Linux doubles it). Its default is up to 6 MiB, so that
a peer that reads nothing would be noticed late.
"""


def listen(
    host: str, port: int, *, stall_s: float, buffer_bytes: int | None = KERNEL_BYTES, reuse_port: bool = False
) -> socket.socket:
    """Return a listening socket, whose connections end when the peer accepts no byte for `stall_s`. Raises OSError.

    uvicorn's own sockets have no such limit: data of closed ones would wait for their peers. `reuse_port` shares a port
    with a socket of the same user that shares it, too.
    """
    sock = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" is all addresses of both families
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
        # Otherwise the kernel keeps the end of an answer until the peer has confirmed what is before it (RFC 896), up
        # to 40 ms. asyncio sets this only for sockets that were made with the protocol's number.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def server_config(app: ASGIApp, *, shutdown_s: int, **settings: Any) -> uvicorn.Config:  # noqa: ANN401 - of uvicorn
    """Return settings of a server that logs no requests (addresses may hold tokens), trusts no headers of proxies, and
    ends connections `shutdown_s` after a signal.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # at INFO it logs addresses of WebSockets
    return uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=shutdown_s,
        **settings,
    )
