"""Addresses that browsers try for a name below `localhost`, and the user at the other end of a local connection.

Browsers lead `*.localhost` to [::1] and 127.0.0.1 of their own machine, Chromium to [::1] first. A server that holds
only one of them shares such a name with the holder of the other: its page, codes and cookies may be sent to either.
"""

import contextlib
import errno
import ipaddress
import os
import pathlib
import socket

V4 = "127.0.0.1"
V6 = "::1"
_TABLES = {4: pathlib.Path("/proc/net/tcp"), 6: pathlib.Path("/proc/net/tcp6")}
"""Linux's tables of TCP sockets (proc_net_tcp(5)), by version of IP."""
_USERS = pathlib.Path("/proc/self/uid_map")
"""Users of this process's user namespace (user_namespaces(7))."""
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


def is_another_user(peer: tuple[str, int] | None, own: tuple[str, int] | None) -> bool:
    """Return true if a socket of another user of this computer is at the other end of a connection.

    False for root, for a peer on another computer, and where that cannot be determined: without Linux's /proc, or in
    a user namespace, to which all users outside of it look alike. `peer` and `own`: address and port of both ends.
    """
    if peer is None or own is None:
        return False
    try:
        if _USERS.read_text(encoding="ascii").split() != ["0", "0", "4294967295"]:
            return False
        uid = _uid_of(_read_address(peer[0]), peer[1], _read_address(own[0]), own[1])
    except (OSError, ValueError):
        return False
    return uid not in {None, 0, os.getuid()}


def _uid_of(
    host: ipaddress.IPv4Address | ipaddress.IPv6Address,
    port: int,
    remote: ipaddress.IPv4Address | ipaddress.IPv6Address,
    remote_port: int,
) -> int | None:
    """Return the user of the socket with these two ends; None without such a socket. Raises OSError, ValueError."""
    ends = [_in_table(host, port), _in_table(remote, remote_port)]
    for row in _TABLES[host.version].read_text(encoding="ascii").splitlines()[1:]:
        fields = row.split()
        if fields[1:3] == ends:
            return int(fields[7])
    return None


def _read_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address; one of IPv4 that an IPv6 socket reports is that of IPv4. Raises ValueError."""
    address = ipaddress.ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address


def _in_table(address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int) -> str:
    """Format an end as the table does: in integers of 32 bits, which are little-endian on all of our platforms."""
    packed = address.packed
    integers = (packed[place : place + 4][::-1].hex() for place in range(0, len(packed), 4))
    return f"{''.join(integers)}:{port:04x}".upper()
