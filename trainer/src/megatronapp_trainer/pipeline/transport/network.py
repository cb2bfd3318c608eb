"""Paths to ranks on other nodes, over UCX: its library, the network devices, and the exchange of addresses."""

import importlib.util
import logging
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

import megatronapp_native as native
from megatronapp_trainer.errors import TransferError, UsageError
from megatronapp_trainer.pipeline.transport.inboxes import Inboxes, TransportAgreement
from megatronapp_trainer.pipeline.transport.tensor_transport import (
    TensorTransport,
    TransportOptions,
    raises_trainer_errors,
)

UCX_LIBRARY = "MEGATRONAPP_UCX_LIBRARY"
"""Variable with the path or name of the libucp.so.0 to use; a user sets it, so it is not one of the launcher's."""
INTERFACES = pathlib.Path("/sys/class/net")

_log = logging.getLogger(__name__)


def ucx_library(environment: Mapping[str, str] = os.environ) -> str:
    """Return path or name of `libucp.so.0`: that of MEGATRONAPP_UCX_LIBRARY, the wheel's, or the system's."""
    named = environment.get(UCX_LIBRARY)
    if named:
        return named
    wheel = importlib.util.find_spec("libucx")
    if wheel is not None and wheel.origin is not None:
        return str(pathlib.Path(wheel.origin).parent / "lib" / "libucp.so.0")
    return "libucp.so.0"


@raises_trainer_errors
def devices_at(address: str, interfaces: pathlib.Path = INTERFACES) -> str:
    """Return the devices at an address of this machine, as UCX names them; UCX chooses if the address is empty.

    They are the interface (for TCP) and the ports of its InfiniBand or RoCE adapter (for RDMA).

    Raises:
        TransferError: no interface has the address.
    """
    if not address:
        return ""
    interface = native.interface_of(address)
    port_file = interfaces / interface / "dev_port"
    port = int(port_file.read_text()) + 1 if port_file.exists() else 1
    adapters = sorted(path.name for path in (interfaces / interface / "device" / "infiniband").glob("*"))
    return ",".join([*(f"{adapter}:{port}" for adapter in adapters), interface])


def connected(options: TransportOptions, inboxes: Inboxes, agreement: TransportAgreement) -> TensorTransport:
    """Return a transport with a path to each peer, through shared memory or UCX; collective over the world.

    Raises:
        UsageError: a rank cannot use UCX and has peers on other nodes.
        PeerLostError: a rank did not connect.
    """
    transport = TensorTransport(
        options,
        peers=[peer for peer in inboxes.neighbours if peer not in agreement.remote],
        boards=[peer for peer in inboxes.boards if peer not in agreement.remote],
    )
    remote = UcxPeers(agreement.remote, messages=inboxes.neighbours, address=inboxes.address, gather=gather_over_world)
    round_trips = transport.connect(remote if agreement.spans_nodes else None)
    for peer, path in transport.paths.items():
        if peer in round_trips:
            _log.info("path to rank %d: %s, round trip %.0f us", peer, path, 1e-3 * round_trips[peer])
        elif options.device is not None:
            _log.info("path to rank %d: %s", peer, path)
    return transport


def gather_over_world(value: object) -> list[Any]:
    """Return the object of each rank of torch.distributed, by rank; collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class UcxPeers:
    """Peers on other nodes, which UCX reaches."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        messages: Collection[int],
        address: str,
        gather: Callable[[object], list[Any]],
    ) -> None:
        """Take the peers of this rank on other nodes.

        Args:
            ranks: of the peers; none on a rank that only takes part in the exchange of addresses.
            messages: those of the peers, or more ranks, that exchange messages with this one; with the others only
                progress and logs are shared.
            address: of this rank for its peers; UCX chooses a device if it is empty.
            gather: exchanges an object of each rank, a collective of all ranks of the job; returns them by rank.
        """
        self.ranks = ranks
        self._messages = messages
        self._address = address
        self._gather = gather

    def add_to(self, endpoint: native.TransportEndpoint) -> None:
        """Exchange addresses and add the peers; a collective. Raises UsageError if a rank cannot."""
        own: tuple[bytes, str] = (b"", "")
        if self.ranks:
            try:
                own = endpoint.open_network(library=ucx_library(), devices=devices_at(self._address)), ""
            except (TransferError, native.TransportError) as error:
                own = b"", str(error)
        addresses: list[tuple[bytes, str]] = self._gather(own)
        for rank, (_, problem) in enumerate(addresses):
            if problem:
                raise UsageError(f"rank {rank} has no path to ranks on other nodes: {problem}")
        for peer in self.ranks:
            endpoint.add_remote_peer(peer, peer in self._messages, addresses[peer][0])
