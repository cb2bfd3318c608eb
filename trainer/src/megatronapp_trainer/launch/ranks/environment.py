"""The environment of a rank, as a pure function."""

from collections.abc import Mapping, Sequence

from megatronapp_common.names import Env
from megatronapp_trainer.launch.config.interface import WorkerAddress
from megatronapp_trainer.launch.ranks.connections import CONNECTIONS, device_connections
from megatronapp_trainer.launch.rendezvous.rank_table import RankTable

DEFAULTS = {
    "OMP_NUM_THREADS": "1",  # ranks share the processors of their node
    "PYTHONUNBUFFERED": "1",  # the last lines before a crash are the evidence
}
"""Variables that a rank gets unless its job sets them."""
ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the options of torch's allocator; the second is the older name."""
NODE_IPS = "MEGATRON_NODE_IPS"
NODE_IPS_BYTES = 64 << 10
"""Limit of the list of addresses; Linux starts no program with a variable above 128 KiB (MAX_ARG_STRLEN, execve(2))."""


def rank_environment(
    base: Mapping[str, str],
    table: RankTable,
    *,
    worker: int,
    local_rank: int,
    place: WorkerAddress,
    arguments: Sequence[str] = (),
) -> dict[str, str]:
    """Return `base` with the variables that torch and Megatron expect of rank `local_rank` of `worker`.

    `arguments`: the flags of the ranks.
    """
    entry = table.worker(worker)
    role = entry.roles[local_rank] if entry.roles else None
    node_rank = str(table.node_rank(worker))
    return {
        **DEFAULTS,
        CONNECTIONS: device_connections(arguments, role),
        **_interface(place),
        **_graph_registration(base),
        **{name: value for name, value in base.items() if name != NODE_IPS},
        **_node_ips(table),
        Env.ADDRESS: place.address,
        Env.NODE_NAME: entry.node,
        Env.WORKER_INDEX: str(worker),  # of a spare that has taken a place, that of its place
        **({} if role is None else {Env.RANK_ROLE: role.value}),
        "RANK": str(entry.ranks[local_rank]),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(table.world_size),
        "LOCAL_WORLD_SIZE": str(len(entry.ranks)),
        "NPROC_PER_NODE": str(len(entry.ranks)),
        "GROUP_RANK": node_rank,
        "NODE_RANK": node_rank,
        "NNODES": str(len(table.workers)),
        "NODE_IPS": ",".join(worker.address for worker in table.workers),
        "MASTER_ADDR": table.master_address,
        "MASTER_PORT": str(table.master_port),
    }


def _node_ips(table: RankTable) -> dict[str, str]:
    """Return the address of each rank if they fit; the table in RUN_DIR has them in any case."""
    addresses = ",".join(worker.address for worker in table.workers for _ in worker.ranks)
    return {NODE_IPS: addresses} if len(addresses) <= NODE_IPS_BYTES else {}


def _interface(place: WorkerAddress) -> dict[str, str]:
    """Name the gang's interface: gloo and NCCL pick one by themselves, which may be another."""
    if place.interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": place.interface, "NCCL_SOCKET_IFNAME": f"={place.interface}"}


def _graph_registration(base: Mapping[str, str]) -> dict[str, str]:
    """Let NCCL register no buffers of CUDA graphs whose memory is in torch's expandable segments.

    NCCL takes each buffer for a part of a single allocation. Without this, collectives of tensor groups in graphs, of
    training or generation, may hang or access other memory; megatron-core's own graphs require it, too.
    """
    options = [option.replace(" ", "") for name in ALLOCATOR_OPTIONS for option in base.get(name, "").split(",")]
    return {"NCCL_GRAPH_REGISTER": "0"} if "expandable_segments:True" in options else {}
