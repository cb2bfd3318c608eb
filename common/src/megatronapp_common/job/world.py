"""How many ranks, on which workers: nodes, procPerNode, gpusPerNode and parallelism brought together."""

import dataclasses

from megatronapp_common.errors import JobError, TopologyError
from megatronapp_common.job.model import MAX_NODES, MAX_PROC_PER_NODE
from megatronapp_common.job.spec import Spec
from megatronapp_common.topology import Placement, Topology


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The size of a gang."""

    proc_per_node: tuple[int, ...]
    """Ranks of each worker, in worker order."""
    topology: Topology
    """Sizes of the parallel groups, ``data`` filled in."""

    @property
    def data_parallel_size(self) -> int:
        """Model replicas."""
        return self.topology.data

    @property
    def placement(self) -> Placement:
        """Which worker runs which ranks."""
        return Placement(self.proc_per_node)

    @property
    def nodes(self) -> int:
        """Workers."""
        return len(self.proc_per_node)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(self.proc_per_node)


def derive_world(spec: Spec) -> World:
    """The world of a job.

    With ``parallelism.data`` the world is derived from it; without, ``data`` is derived from nodes x procPerNode;
    with both they must agree. What is missing of nodes and procPerNode is derived, from gpusPerNode where it is given.

    Raises JobError where the numbers do not agree. `load_job` refuses such a spec before, and says which of them to
    change (`rules.world`).
    """
    layout = spec.parallelism
    replica = Topology(tensor=layout.tensor, context=layout.context, pipeline=layout.pipeline).world_size
    nodes, per_node = _workers(spec, replica)
    ranks = nodes * per_node
    agreed = ranks % replica == 0 if layout.data is None else ranks == replica * layout.data
    if not (agreed and nodes <= MAX_NODES and 1 <= per_node <= MAX_PROC_PER_NODE):
        raise JobError(
            f"spec.parallelism: {nodes} nodes x {per_node} ranks do not fit replicas of {replica} ranks and data "
            f"{layout.data}; change one of them"
        )
    sizes = {"tensor": layout.tensor, "context": layout.context, "expert": layout.expert, "pipeline": layout.pipeline}
    try:
        return World(proc_per_node=(per_node,) * nodes, topology=Topology.of_world(ranks, **sizes))
    except TopologyError as error:
        raise JobError(f"spec.parallelism.{error}") from error


def _workers(spec: Spec, replica: int) -> tuple[int, int]:
    """Nodes and ranks of each as written or derived, whether or not they agree with the rest."""
    if spec.parallelism.data is None:
        nodes = spec.nodes or 1
        return nodes, spec.proc_per_node or spec.gpus_per_node or replica // nodes
    world = replica * spec.parallelism.data
    free = min(spec.gpus_per_node or world, world)
    nodes = spec.nodes or max(1, world // (spec.proc_per_node or free))
    return nodes, spec.proc_per_node or (max(1, world // nodes) if spec.nodes else free)
