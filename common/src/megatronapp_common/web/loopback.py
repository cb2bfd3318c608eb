"""Addresses that browsers try for a name below `localhost`.

Browsers lead `*.localhost` to [::1] and 127.0.0.1 of their own machine, Chromium to [::1] first. A server that holds
only one of them shares such a name with the holder of the other: its page, codes and cookies may be sent to either.
"""

import contextlib
import errno
import socket

V4 = "127.0.0.1"
V6 = "::1"
_NO_SUCH_ADDRESS = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})


def is_shared(host: str) -> bool:
    """Return true if a host to listen on is the address of names below `localhost`, and not, say, 127.0.0.5."""
    return host in {V4, "localhost"}


def has_ipv6() -> bool:
    """Return true if this machine has [::1], or if that cannot be determined."""
    try:
        with contextlib.closing(socket.socket(socket.AF_INET6, socket.SOCK_STREAM)) as probe:
            probe.bind((V6, 0))
    except OSError as error:
        return error.errno not in _NO_SUCH_ADDRESS
    return True


def addresses() -> tuple[str, ...]:
    """Return all addresses of a name below `localhost` on this machine, 127.0.0.1 first."""
    return (V4, V6) if has_ipv6() else (V4,)


def authority(host: str, port: int) -> str:
    """Return a host and a port as a URL has them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(host: str) -> socket.AddressFamily:
    """Return IPv6 for its addresses, otherwise IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
