"""Option of sockets that sends answers at once."""

import socket


def set_tcp_nodelay(listener: socket.socket) -> None:
    """Make connections of a listening socket send the end of an answer without waiting.

    Otherwise the kernel keeps the last bytes until the peer has confirmed those before them (RFC 896), and peers take
    up to 40 ms for that. asyncio sets this only for sockets that were made with the protocol's number. Linux hands it
    on to each connection.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
