"""How many ranks, on which workers: nodes, procPerNode, gpusPerNode and parallelism brought together."""

import dataclasses

from megatronapp_common.errors import JobError, TopologyError
from megatronapp_common.job.spec import MAX_NODES, MAX_PROC_PER_NODE, Spec
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

    Raises JobError that says which of the numbers to change.
    """
    layout = spec.parallelism
    replica = Topology(tensor=layout.tensor, context=layout.context, pipeline=layout.pipeline).world_size
    workers = _from_workers(spec, replica) if layout.data is None else _from_data(spec, replica)
    sizes = {"tensor": layout.tensor, "context": layout.context, "expert": layout.expert, "pipeline": layout.pipeline}
    try:
        return World(proc_per_node=workers, topology=Topology.of_world(sum(workers), **sizes))
    except TopologyError as error:
        raise JobError(f"spec.parallelism.{error}") from error


def _groups(spec: Spec) -> str:
    layout = spec.parallelism
    sizes = [("tensor", layout.tensor), ("context", layout.context), ("pipeline", layout.pipeline)]
    return " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name != "context")


def _from_workers(spec: Spec, replica: int) -> tuple[int, ...]:
    nodes = spec.nodes or 1
    per_node = spec.proc_per_node or spec.gpus_per_node
    if not per_node:
        per_node, rest = divmod(replica, nodes)
        if rest:
            raise JobError(
                f"spec.procPerNode: is missing and {replica} ranks ({_groups(spec)}) cannot be spread over {nodes} "
                f"nodes; write procPerNode, or change nodes to a divisor of {replica}"
            )
    world = nodes * per_node
    if world % replica:
        raise JobError(
            f"spec.parallelism: {world} ranks ({nodes} nodes x {per_node}) cannot be divided into replicas of "
            f"{replica} ranks ({_groups(spec)}); make nodes x procPerNode a multiple of {replica}"
        )
    return _spread(nodes, per_node)


def _from_data(spec: Spec, replica: int) -> tuple[int, ...]:
    nodes, per_node, world = spec.nodes, spec.proc_per_node, replica * (spec.parallelism.data or 1)
    if nodes is None and per_node is None:
        per_node = min(spec.gpus_per_node or world, world)
    if nodes is None:
        assert per_node is not None
        nodes = max(1, world // per_node)
    if per_node is None:
        per_node = max(1, world // nodes)
    if nodes * per_node != world:
        raise JobError(_disagreement(spec, replica, nodes, per_node))
    return _spread(nodes, per_node)


def _spread(nodes: int, per_node: int) -> tuple[int, ...]:
    """Ranks of each worker; derived numbers keep to the same limits as written ones."""
    if per_node > MAX_PROC_PER_NODE:
        world, fewest = nodes * per_node, -(-nodes * per_node // MAX_PROC_PER_NODE)
        raise JobError(
            f"spec.nodes: {world} ranks on {nodes} nodes are {per_node} on each, at most {MAX_PROC_PER_NODE} are "
            f"possible; write nodes: {fewest} or more"
        )
    if nodes > MAX_NODES:
        raise JobError(f"spec.parallelism: needs {nodes} nodes of {per_node} ranks; at most {MAX_NODES} are possible")
    return (per_node,) * nodes


def _disagreement(spec: Spec, replica: int, nodes: int, per_node: int) -> str:
    data = spec.parallelism.data or 1
    world = replica * data
    start = f"spec.parallelism.data: {data} replicas of {replica} ranks ({_groups(spec)}) are {world}"
    if nodes * per_node % replica == 0:
        fix = f"write data: {nodes * per_node // replica}, or leave data out"
    else:
        fix = f"make nodes x procPerNode equal to {world}"
    return f"{start} ranks, but {nodes} nodes x {per_node} are {nodes * per_node}; {fix}"
