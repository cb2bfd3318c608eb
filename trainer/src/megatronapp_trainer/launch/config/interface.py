"""Which address of this machine a worker gives to the gang: by interface, by attachment, as told, or by host name."""

import dataclasses
import json
import re
import socket
from collections.abc import Mapping
from typing import Any

import psutil

from megatronapp_common.names import Env
from megatronapp_trainer.errors import RendezvousError, UsageError
from megatronapp_trainer.launch.config import address

Interfaces = Mapping[str, tuple[str, ...]]
"""IPv4 addresses of each interface; none where it has only others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Where a worker is found."""

    address: str
    """IPv4 address of its ranks."""
    interface: str | None = None
    """The interface that has it; None: no interface lists it, as with most addresses of the loopback."""
    door: str
    """Where it listens for other launchers, if it is worker 0: they look for it by name, which is that of the pod's
    first address. Empty: at all addresses."""


def find_worker_address(environment: Mapping[str, str], host_name: str) -> WorkerAddress:
    """The first way of INTERFACE, NETWORK_STATUS, ADDRESS, host name that is given.

    Raises:
        UsageError: a variable cannot be understood, or gives an address of IPv6.
        RendezvousError: nothing has that address or name.
    """
    given = environment.get(Env.ADDRESS) or None
    door = "" if given is None else address.require_ipv4(given)
    if wanted := environment.get(Env.INTERFACE):
        name, found = pick_interface(wanted, own_interfaces())
        return WorkerAddress(address=found, interface=name, door=door)
    if (attached := attachment(environment.get(Env.NETWORK_STATUS, ""))) is not None:
        found, interface = attached
        return WorkerAddress(address=found, interface=interface, door=door)
    own = address.own_address(given, host_name)
    return WorkerAddress(address=own, interface=interface_of(own, own_interfaces()), door=own)


def interface_of(wanted: str, interfaces: Interfaces) -> str | None:
    """The first interface, by name, that has this address."""
    return next((name for name, found in sorted(interfaces.items()) if wanted in found), None)


def own_interfaces() -> Interfaces:
    """What this machine has now."""
    return {
        name: tuple(one.address for one in addresses if one.family == socket.AF_INET)
        for name, addresses in psutil.net_if_addrs().items()
    }


def pick_interface(wanted: str, interfaces: Interfaces) -> tuple[str, str]:
    """Name and address of the interface with this name, else of the first one, by name, that the expression matches.

    Raises UsageError for a wrong expression, RendezvousError if no such interface has an IPv4 address.
    """
    try:
        pattern = re.compile(wanted)
    except re.error as error:
        raise UsageError(f"{Env.INTERFACE} is {wanted!r}, which is no regular expression: {error}") from None
    names = [wanted] if wanted in interfaces else sorted(name for name in interfaces if pattern.fullmatch(name))
    for name in names:
        if interfaces[name]:
            return name, interfaces[name][0]
    if names:
        raise RendezvousError(f"{', '.join(names)} ({Env.INTERFACE}) has no IPv4 address; IPv6 is not supported")
    there = ", ".join(f"{name} {' '.join(found) or 'without IPv4'}" for name, found in sorted(interfaces.items()))
    raise RendezvousError(f"no interface is called {wanted} ({Env.INTERFACE}); there are: {there}")


def attachment(network_status: str) -> tuple[str, str | None] | None:
    """Address and interface of the first attachment that is not the default one; None if there is none.

    `network_status` is a list as the Network Plumbing Working Group has specified it for
    k8s.v1.cni.cncf.io/network-status. Raises UsageError if it is another text, or has only addresses of IPv6.
    """
    if not network_status.strip():
        return None
    for entry in _entries(network_status):
        if entry.get("default") is True:
            continue
        addresses = [str(one) for one in entry.get("ips") or ()]
        ipv4 = [one for one in addresses if ":" not in one]
        if ipv4:
            interface = entry.get("interface")
            return address.require_ipv4(ipv4[0]), None if interface is None else str(interface)
        if addresses:
            raise UsageError(
                f"the attachment {entry.get('name')} has the address {addresses[0]}: IPv6 is not supported; "
                "give the network IPv4 addresses"
            )
    return None


def _entries(network_status: str) -> list[dict[str, Any]]:
    try:
        entries = json.loads(network_status)
    except ValueError:
        entries = None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{Env.NETWORK_STATUS} is not a list of attachments: {network_status[:100]!r}")
    return entries
