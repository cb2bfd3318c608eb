"""Worker groups for jobs of the plan that have no manifest."""

from megatronapp_common.job import WorkerGroup
from megatronapp_common.job.api.cluster import Resources
from megatronapp_common.topology import RankRole


def worker_groups(workers: int, forward: int = 0) -> tuple[WorkerGroup, ...]:
    """Return one group of workers with a rank each, or backward workers and `forward` forward workers after them."""
    if forward == 0:
        return (_group(RankRole.ALL, 0, workers),)
    return (_group(RankRole.BACKWARD, 0, workers - forward), _group(RankRole.FORWARD, workers - forward, forward))


def _group(role: RankRole, first: int, nodes: int) -> WorkerGroup:
    return WorkerGroup(
        role=role,
        first=first,
        nodes=nodes,
        proc_per_node=1,
        gpus_per_node=0,
        node_selector={},
        resources=Resources(),
    )
