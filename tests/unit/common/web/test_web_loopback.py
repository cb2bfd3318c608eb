"""Resolution of names below `localhost` to addresses."""

import contextlib
import errno
import os
import pathlib
import socket

import pytest

from megatronapp_common.web import loopback


def test_all_addresses_of_a_name_below_localhost_are_returned() -> None:
    """Check both families: the C library may not resolve such names itself (RFC 6761)."""
    assert loopback.addresses()[0] == "127.0.0.1"
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))  # this machine has it
    assert loopback.addresses() == ("127.0.0.1", "::1")
    assert [loopback.family_of(address) for address in loopback.addresses()] == [socket.AF_INET, socket.AF_INET6]


@pytest.mark.parametrize(
    ("code", "there"), [(errno.EAFNOSUPPORT, False), (errno.EADDRNOTAVAIL, False), (errno.EPERM, True)]
)
def test_an_address_family_that_cannot_be_probed_may_exist(
    monkeypatch: pytest.MonkeyPatch, code: int, there: bool
) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError(code, "no")

    monkeypatch.setattr(socket, "socket", refuse)
    assert loopback.has_ipv6() is there


def test_an_address_of_ipv6_has_brackets_in_a_url() -> None:
    assert [loopback.authority(host, 80) for host in ("10.0.0.1", "fd00::1")] == ["10.0.0.1:80", "[fd00::1]:80"]


@pytest.mark.parametrize(
    ("host", "shared"), [("127.0.0.1", True), ("localhost", True), ("127.0.0.5", False), ("0.0.0.0", False)]
)
def test_which_hosts_names_below_localhost_lead_to(host: str, shared: bool) -> None:
    assert loopback.is_shared(host) is shared


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_the_user_at_the_other_end_of_a_local_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, host: str
) -> None:
    users = tmp_path / "uid_map"
    users.write_text("         0          0 4294967295\n")
    monkeypatch.setattr(loopback, "_USERS", users)
    listens_at = "::" if ":" in host else host
    with socket.create_server((listens_at, 0), family=loopback.family_of(host), dualstack_ipv6=":" in host) as server:
        port = server.getsockname()[1]
        with (
            socket.create_connection((host.removeprefix("::ffff:"), port)),
            contextlib.closing(server.accept()[0]) as own,
        ):
            ends = own.getpeername()[:2], own.getsockname()[:2]
            assert not loopback.is_another_user(*ends)
            user = os.getuid()
            monkeypatch.setattr(os, "getuid", lambda: user + 1)
            assert loopback.is_another_user(*ends) is (user != 0), "root is trusted"
            monkeypatch.setattr(loopback, "_uid_of", lambda *_: user + 2)
            assert loopback.is_another_user(*ends)
            users.write_text("         0       1000          1\n")
            assert not loopback.is_another_user(*ends), "not known in a user namespace"
    assert not loopback.is_another_user(("192.0.2.1", 80), ("192.0.2.2", 81))
    assert not loopback.is_another_user(None, ("127.0.0.1", 80))
