"""The environment of a rank. Pure."""

from collections.abc import Mapping

from megatronapp_common.names import Env
from megatronapp_trainer.launch.table import RankTable

DEFAULTS = {
    "OMP_NUM_THREADS": "1",  # ranks share the processors of their machine
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron needs kernels to start in the order in which they are launched
    "PYTHONUNBUFFERED": "1",  # the last lines before a crash are the evidence
}
"""What a rank gets unless its job sets it."""


def rank_environment(
    base: Mapping[str, str], table: RankTable, *, worker: int, local_rank: int, address: str
) -> dict[str, str]:
    """`base` with what torch and Megatron expect of rank `local_rank` of `worker`."""
    entry = table.workers[worker]
    return {
        **DEFAULTS,
        **base,
        Env.ADDRESS: address,
        Env.NODE_NAME: entry.node,
        "RANK": str(entry.ranks[local_rank]),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(table.world_size),
        "LOCAL_WORLD_SIZE": str(len(entry.ranks)),
        "GROUP_RANK": str(worker),
        "MASTER_ADDR": table.master_address,
        "MASTER_PORT": str(table.master_port),
    }
