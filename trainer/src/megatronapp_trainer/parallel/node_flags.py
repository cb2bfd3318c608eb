"""Comparison of MegatronApp's flags about nodes with where the ranks are."""

import socket
from collections.abc import Callable, Iterator, Mapping

from megatronapp_trainer.config.dpp import DppConfig
from megatronapp_trainer.errors import UsageErrors
from megatronapp_trainer.parallel.layout import Layout


def is_own_address(address: str) -> bool:
    """Return True if an interface of this machine has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def check_node_flags(
    dpp: DppConfig, layout: Layout, environment: Mapping[str, str], *, is_own: Callable[[str], bool] = is_own_address
) -> None:
    """Raise UsageErrors if ``--num-gpus``, ``--multi-node`` or ``--node-ips`` differ from what the launcher says.

    Args:
        dpp: the flags; ``--node-ips`` has one address for each rank.
        layout: this rank.
        environment: variables of the launcher, ours or torchrun.
        is_own: whether an address is of this machine; asked where the launcher gives no list of addresses.
    """
    problems = [*_sizes(dpp, layout, environment), *_addresses(dpp, layout, environment, is_own)]
    if problems:
        raise UsageErrors(problems)


def _sizes(dpp: DppConfig, layout: Layout, environment: Mapping[str, str]) -> Iterator[str]:
    if dpp.num_gpus is None and not dpp.multi_node:
        return
    text = environment.get("LOCAL_WORLD_SIZE", "")
    if not text.isdecimal():
        yield "--num-gpus and --multi-node cannot be checked: LOCAL_WORLD_SIZE is not set; leave them out"
        return
    local = int(text)
    if dpp.num_gpus not in {None, local}:
        yield (
            f"--num-gpus {dpp.num_gpus}: the node of rank {layout.global_rank} has {local} ranks; give {local}, or "
            "leave it out"
        )
    if dpp.multi_node and local == layout.global_world_size:
        yield f"--multi-node: all {local} ranks are on one node; leave it out"


def _addresses(
    dpp: DppConfig, layout: Layout, environment: Mapping[str, str], is_own: Callable[[str], bool]
) -> Iterator[str]:
    given = dpp.addresses
    if not given:
        return
    if "MEGATRON_NODE_IPS" not in environment:  # torchrun, or a list that is too long for a variable
        rank = layout.global_rank
        own = given[rank]
        if not is_own(own):
            yield f"--node-ips: rank {rank} is not at {own}, which no interface of its machine has; leave it out"
        return
    table = environment["MEGATRON_NODE_IPS"].split(",")
    for rank, (address, actual) in enumerate(zip(given, table, strict=True)):
        if address != actual:
            yield f"--node-ips: rank {rank} is at {actual}, not at {address}; leave it out, or give {','.join(table)}"
            return
