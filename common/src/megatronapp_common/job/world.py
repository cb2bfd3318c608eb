"""How many ranks, on which workers: nodes, procPerNode, gpusPerNode, parallelism and fbd brought together."""

import dataclasses
import enum
from collections.abc import Mapping

from megatronapp_common.errors import JobError, TopologyError
from megatronapp_common.job.api.cluster import Resources
from megatronapp_common.job.api.model import MAX_NODES, MAX_PROC_PER_NODE
from megatronapp_common.job.api.runtimes import ForwardWorkers
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.topology import FbdWorld, Placement, Topology


class WorkerRole(enum.StrEnum):
    """What the ranks of a worker do."""

    ALL = "all"
    """Forward and backward; with MegaFBD beside each other, the trainer deals the roles out."""
    BACKWARD = "backward"
    """Backward only: MegaFBD with forward workers of their own."""
    FORWARD = "forward"
    """Forward only."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """Workers that are alike."""

    role: WorkerRole
    """What their ranks do."""
    first: int
    """Index of the first one; the others follow."""
    nodes: int
    """How many."""
    proc_per_node: int
    """Ranks of each."""
    gpus_per_node: int
    """GPUs of each; 0: the CPU."""
    node_selector: Mapping[str, str]
    """Labels of the nodes that they go to."""
    resources: Resources
    """What the trainer's container gets, without GPUs and RDMA devices."""

    @property
    def workers(self) -> range:
        """Their indices."""
        return range(self.first, self.first + self.nodes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The size of a gang.

    With MegaFBD and workers of their own for forward ranks, these come last: backward workers have the indices and
    ranks from 0 on, in Megatron's order of ranks, then forward workers theirs, in the same order.
    """

    worker_groups: tuple[WorkerGroup, ...]
    """One group, or backward workers and forward workers, in worker order."""
    topology: Topology
    """Sizes of the parallel groups that are trained with, ``data`` filled in."""
    fbd: FbdWorld | None = None
    """Counts of forward and backward ranks with MegaFBD."""

    @property
    def proc_per_node(self) -> tuple[int, ...]:
        """Ranks of each worker, in worker order; forward workers may have another number than backward ones."""
        return tuple(group.proc_per_node for group in self.worker_groups for _ in group.workers)

    @property
    def data_parallel_size(self) -> int:
        """Model replicas that are trained with."""
        return self.topology.data

    @property
    def placement(self) -> Placement:
        """Which worker runs which ranks."""
        return Placement(self.proc_per_node)

    @property
    def nodes(self) -> int:
        """Workers."""
        return sum(group.nodes for group in self.worker_groups)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(group.nodes * group.proc_per_node for group in self.worker_groups)

    def group_of(self, worker: int) -> WorkerGroup:
        """The group of a worker. Raises TopologyError for a worker that does not exist."""
        for group in self.worker_groups:
            if worker in group.workers:
                return group
        raise TopologyError(f"worker {worker} does not exist; there are {self.nodes}")


def derive_world(spec: Spec) -> World:
    """The world of a job.

    With ``parallelism.data`` the world is derived from it; without, ``data`` is derived from nodes x procPerNode;
    with both they must agree. What is missing of nodes and procPerNode is derived, from gpusPerNode where it is given.
    With ``fbd`` the ranks of a replica are its backward and its forward ones; with ``fbd.forward`` the latter go to
    workers of their own, and nodes x procPerNode are backward ranks alone.

    Raises JobError where the numbers do not agree. `load_job` refuses such a spec before, and says which of them to
    change (`rules.world`, `rules.runtimes`).
    """
    apart = spec.fbd.forward if spec.fbd.enabled else None
    replica = _replica(spec)
    nodes, per_node = _workers(spec, replica)
    replicas = _replicas(spec, nodes, per_node, replica)
    topology = _topology(spec, replicas)
    fbd = FbdWorld(trained=topology, merged=spec.fbd.ignore_forward_tensor_parallel) if spec.fbd.enabled else None
    group = WorkerGroup(
        role=WorkerRole.ALL if apart is None else WorkerRole.BACKWARD,
        first=0,
        nodes=nodes,
        proc_per_node=per_node,
        gpus_per_node=spec.gpus_per_node,
        node_selector=spec.node_selector,
        resources=spec.resources,
    )
    if apart is None or fbd is None:
        return World(worker_groups=(group,), topology=topology, fbd=fbd)
    forward = _forward_group(spec, apart, fbd.forward_ranks, nodes)
    return World(worker_groups=(group, forward), topology=topology, fbd=fbd)


def _replica(spec: Spec) -> int:
    """Ranks of one replica on the workers that nodes and procPerNode are about."""
    layout, fbd = spec.parallelism, spec.fbd
    replica = Topology(tensor=layout.tensor, context=layout.context, pipeline=layout.pipeline)
    if not fbd.enabled or fbd.forward is not None:
        return replica.world_size
    return FbdWorld(trained=replica, merged=fbd.ignore_forward_tensor_parallel).world_size


def _replicas(spec: Spec, nodes: int, per_node: int, replica: int) -> int:
    data, ranks = spec.parallelism.data, nodes * per_node
    agreed = ranks % replica == 0 if data is None else ranks == replica * data
    if not (agreed and nodes <= MAX_NODES and 1 <= per_node <= MAX_PROC_PER_NODE):
        raise JobError(
            f"spec.parallelism: {nodes} nodes x {per_node} ranks do not fit replicas of {replica} ranks and data "
            f"{data}; change one of them"
        )
    return ranks // replica


def _topology(spec: Spec, replicas: int) -> Topology:
    layout = spec.parallelism
    sizes = {"tensor": layout.tensor, "context": layout.context, "expert": layout.expert, "pipeline": layout.pipeline}
    try:
        return Topology(**sizes, data=replicas)
    except TopologyError as error:
        raise JobError(f"spec.parallelism.{error}") from error


def _workers(spec: Spec, replica: int) -> tuple[int, int]:
    """Nodes and ranks of each as written or derived, whether or not they agree with the rest."""
    if spec.parallelism.data is None:
        nodes = spec.nodes or 1
        return nodes, spec.proc_per_node or spec.gpus_per_node or replica // nodes
    return _spread(replica * spec.parallelism.data, spec.nodes, spec.proc_per_node, spec.gpus_per_node)


def _spread(ranks: int, nodes: int | None, per_node: int | None, gpus: int) -> tuple[int, int]:
    """Nodes and ranks of each for a number of ranks."""
    free = min(gpus or ranks, ranks)
    count = nodes or max(1, ranks // (per_node or free))
    return count, per_node or (max(1, ranks // count) if nodes else free)


def _forward_group(spec: Spec, forward: ForwardWorkers, ranks: int, first: int) -> WorkerGroup:
    """The forward workers, behind the backward ones."""
    nodes, per_node = _spread(ranks, forward.nodes, forward.proc_per_node, forward.gpus_per_node)
    fits = per_node <= min(forward.gpus_per_node or MAX_PROC_PER_NODE, MAX_PROC_PER_NODE)
    if nodes * per_node != ranks or not fits or first + nodes > MAX_NODES:
        raise JobError(
            f"spec.fbd.forward: {ranks} forward ranks do not fit {nodes} nodes x {per_node} with "
            f"{forward.gpus_per_node} GPUs on each; change one of them"
        )
    return WorkerGroup(
        role=WorkerRole.FORWARD,
        first=first,
        nodes=nodes,
        proc_per_node=per_node,
        gpus_per_node=forward.gpus_per_node,
        node_selector=spec.node_selector if forward.node_selector is None else forward.node_selector,
        resources=spec.resources if forward.resources is None else forward.resources,
    )
