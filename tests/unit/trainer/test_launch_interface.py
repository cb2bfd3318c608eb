"""Address that a worker gives to the gang."""

import json
import socket
from typing import Any

import psutil
import pytest

from megatronapp_common.names import Env
from megatronapp_trainer.errors import RendezvousError, UsageError
from megatronapp_trainer.launch.config import interface
from megatronapp_trainer.launch.config.interface import WorkerAddress, attachment, find_worker_address, pick_interface
from megatronapp_trainer.launch.ranks.environment import rank_environment
from megatronapp_trainer.launch.rendezvous.messages import JoinRequest
from megatronapp_trainer.launch.rendezvous.rank_table import build_table

FOUND = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.5", "10.0.0.6"), "ib1": ("192.168.1.5",), "ib0": (), "v6": ()}


@pytest.mark.parametrize(
    ("pattern", "picked"),
    [
        ("eth0", ("eth0", "10.0.0.5")),
        ("ib.*", ("ib1", "192.168.1.5")),
        ("ib1|eth.*", ("eth0", "10.0.0.5")),
        ("eth", None),
        ("ib0", None),
        ("net1", None),
    ],
)
def test_an_interface_is_picked_by_name_or_by_an_expression_for_the_whole_name(
    pattern: str, picked: tuple[str, str] | None
) -> None:
    if picked is not None:
        assert pick_interface(pattern, FOUND) == picked
        return
    with pytest.raises(RendezvousError, match=pattern):
        pick_interface(pattern, FOUND)


def test_an_unmatched_interface_lists_the_available_ones() -> None:
    with pytest.raises(
        RendezvousError, match=r"no interface matches net1 .* ib1 192.168.1.5, lo 127.0.0.1, v6 without"
    ):
        pick_interface("net1", FOUND)
    with pytest.raises(
        RendezvousError, match=r"v6 \(MEGATRONAPP_INTERFACE\) has no IPv4 address; IPv6 is not supported"
    ):
        pick_interface("v6", FOUND)
    with pytest.raises(UsageError, match="not a regular expression"):
        pick_interface("ib(", FOUND)


def test_the_interface_of_the_own_address_is_the_libraries_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the defaults: without it gloo and NCCL take what the host's name leads to, or any bridge of a node."""
    monkeypatch.setattr(interface, "own_interfaces", lambda: FOUND | {"cni0": ("10.244.0.1",), "bond0": ("10.7.0.3",)})
    table = build_table([JoinRequest(uid="u", attempt=0, index=0, address="10.7.0.3", node="n", num_ranks=1, port=1)])
    place = find_worker_address({Env.ADDRESS: "10.7.0.3"}, "x")
    made = rank_environment({"NCCL_SOCKET_IFNAME": "mine"}, table, worker=0, local_rank=0, place=place)
    assert (made["GLOO_SOCKET_IFNAME"], made["NCCL_SOCKET_IFNAME"]) == ("bond0", "mine")


def test_the_interfaces_of_this_host_are_found() -> None:
    name = next(
        interface_name for interface_name, addresses in interface.own_interfaces().items() if "127.0.0.1" in addresses
    )
    assert name in psutil.net_if_stats()
    place = find_worker_address(
        {Env.INTERFACE: name, Env.ADDRESS: "127.0.0.7", Env.NETWORK_STATUS: "broken"}, "no-such-host"
    )
    assert place == WorkerAddress(address="127.0.0.1", interface=name, listen_address="127.0.0.7")
    assert find_worker_address({Env.INTERFACE: name}, "no-such-host").listen_address == ""


POD = {"name": "cbr0", "interface": "eth0", "ips": ["10.244.0.9"], "default": True, "dns": {}}
RAIL = {"name": "default/rail-0", "interface": "net1", "ips": ["fd00::9", "192.168.3.9"], "mac": "0a:58", "dns": {}}


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ([], None),
        ([POD], None),
        ([POD, RAIL], ("192.168.3.9", "net1")),
        ([RAIL, POD], ("192.168.3.9", "net1")),
        ([POD, {"name": "no-address"}, RAIL], ("192.168.3.9", "net1")),
        ([{"name": "device", "ips": ["10.1.1.1"]}], ("10.1.1.1", None)),
    ],
)
def test_the_first_attachment_that_is_not_the_default_gives_the_address(
    entries: list[dict[str, Any]], found: tuple[str, str | None] | None
) -> None:
    assert attachment(json.dumps(entries)) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a list of attachments"),
        ("[1]", "is not a list of attachments"),
        (json.dumps([{"name": "rail", "ips": ["fd00::9"]}]), "rail has the address fd00::9: IPv6 is not supported"),
        (json.dumps([{"name": "rail", "ips": ["ten"]}]), "not an IPv4 address"),
    ],
)
def test_attachments_that_cannot_be_used_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attachment(text)


def test_the_ways_to_an_address_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "own_interfaces", lambda: FOUND)
    status = json.dumps([POD, RAIL])
    settings: dict[str, str] = {Env.ADDRESS: "10.0.0.5"}
    assert (
        find_worker_address({**settings, Env.NETWORK_STATUS: status, Env.INTERFACE: "ib1"}, "x").address
        == "192.168.1.5"
    )
    assert find_worker_address({**settings, Env.NETWORK_STATUS: status}, "x") == WorkerAddress(
        address="192.168.3.9", interface="net1", listen_address="10.0.0.5"
    )
    own = WorkerAddress(address="10.0.0.5", interface="eth0", listen_address="10.0.0.5")
    assert find_worker_address({**settings, Env.NETWORK_STATUS: json.dumps([POD])}, "x") == own
    assert find_worker_address({Env.ADDRESS: "10.0.0.9"}, "x").interface is None, "no interface lists it"
    assert find_worker_address({}, "localhost").address == socket.gethostbyname("localhost")
    with pytest.raises(UsageError, match="IPv6"):
        find_worker_address({Env.ADDRESS: "fe80::2", Env.INTERFACE: "ib1"}, "x")
