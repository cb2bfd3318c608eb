"""Address that a worker gives to the gang: by interface, by attachment, as configured, or by host name."""

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
"""IPv4 addresses of each interface; empty for an interface that has only others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Address of a worker, and the interface that has it."""

    address: str
    """IPv4 address of its ranks."""
    interface: str | None = None
    """Interface that has the address; None if no interface lists it, as with most addresses of the loopback."""
    listen_address: str
    """Address where worker 0 listens for other launchers, which resolve the name of its pod: the pod's first address.
    Empty: all addresses.
    """


def find_worker_address(environment: Mapping[str, str], host_name: str) -> WorkerAddress:
    """Find the address by the first of INTERFACE, NETWORK_STATUS, ADDRESS and host name that is given.

    Raises:
        UsageError: a variable cannot be parsed, or gives an IPv6 address.
        RendezvousError: this node does not have that address or interface.
    """
    given = environment.get(Env.ADDRESS) or None
    listen_address = "" if given is None else address.require_ipv4(given)
    if expression := environment.get(Env.INTERFACE):
        name, found = pick_interface(expression, own_interfaces())
        return WorkerAddress(address=found, interface=name, listen_address=listen_address)
    if (attached := attachment(environment.get(Env.NETWORK_STATUS, ""))) is not None:
        found, interface = attached
        return WorkerAddress(address=found, interface=interface, listen_address=listen_address)
    own = address.own_address(given, host_name)
    return WorkerAddress(address=own, interface=interface_of(own, own_interfaces()), listen_address=own)


def interface_of(own: str, interfaces: Interfaces) -> str | None:
    """Return the first interface, by name, that has this address."""
    return next((name for name, found in sorted(interfaces.items()) if own in found), None)


def own_interfaces() -> Interfaces:
    """Return the IPv4 addresses that each interface of this node has now."""
    return {
        name: tuple(address.address for address in addresses if address.family == socket.AF_INET)
        for name, addresses in psutil.net_if_addrs().items()
    }


def pick_interface(expression: str, interfaces: Interfaces) -> tuple[str, str]:
    """Return name and address of the interface with this name, or of the first one, by name, that the expression
    matches.

    Raises UsageError for an invalid expression, RendezvousError if no such interface has an IPv4 address.
    """
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise UsageError(f"{Env.INTERFACE} is {expression!r}, which is not a regular expression: {error}") from None
    names = [expression] if expression in interfaces else sorted(name for name in interfaces if pattern.fullmatch(name))
    for name in names:
        if interfaces[name]:
            return name, interfaces[name][0]
    if names:
        raise RendezvousError(f"{', '.join(names)} ({Env.INTERFACE}) has no IPv4 address; IPv6 is not supported")
    there = ", ".join(f"{name} {' '.join(found) or 'without IPv4'}" for name, found in sorted(interfaces.items()))
    raise RendezvousError(f"no interface matches {expression} ({Env.INTERFACE}); interfaces here: {there}")


def attachment(network_status: str) -> tuple[str, str | None] | None:
    """Return address and interface of the first attachment that is not the default one, or None without such an
    attachment.

    `network_status` is a list as the Network Plumbing Working Group has specified it for
    k8s.v1.cni.cncf.io/network-status. Raises UsageError if it is another text, or has only IPv6 addresses.
    """
    if not network_status.strip():
        return None
    for entry in _entries(network_status):
        if entry.get("default") is True:
            continue
        addresses = [str(address) for address in entry.get("ips") or ()]
        ipv4 = [address for address in addresses if ":" not in address]
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
