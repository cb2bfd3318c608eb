"""The world of a job, derived from nodes, procPerNode, gpusPerNode, parallelism and fbd."""

import dataclasses
from collections.abc import Mapping

from megatronapp_common.errors import JobError, TopologyError
from megatronapp_common.job.api.cluster import Resources
from megatronapp_common.job.api.model import MAX_NODES, MAX_PROC_PER_NODE
from megatronapp_common.job.api.runtimes import ForwardWorkers
from megatronapp_common.job.api.spec import Spec
from megatronapp_common.topology import FbdWorld, Placement, RankRole, Topology


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """Workers of one role with equal resources."""

    role: RankRole
    """Passes that their ranks run."""
    first: int
    """Index of the first worker; the others follow."""
    nodes: int
    """Number of workers in it."""
    proc_per_node: int
    """Ranks of each worker."""
    gpus_per_node: int
    """GPUs of each worker; 0: the CPU."""
    node_selector: Mapping[str, str]
    """Labels of the nodes that they are scheduled to."""
    resources: Resources
    """Resources of the trainer's container, without GPUs and RDMA devices."""

    @property
    def indices(self) -> range:
        """Indices of the workers."""
        return range(self.first, self.first + self.nodes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Size of a gang.

    With MegaFBD on separate workers, backward workers have the indices and ranks from 0 on, in Megatron's order of
    ranks, and forward workers follow, in the same order.
    """

    worker_groups: tuple[WorkerGroup, ...]
    """One group, or backward workers and forward workers, in worker order."""
    topology: Topology
    """Sizes of the parallel groups of the training, with ``data`` filled in."""
    fbd: FbdWorld | None = None
    """Counts of forward and backward ranks with MegaFBD."""

    @property
    def proc_per_node(self) -> tuple[int, ...]:
        """Ranks of each worker, in worker order; forward workers may have another number than backward ones."""
        return tuple(group.proc_per_node for group in self.worker_groups for _ in group.indices)

    @property
    def data_parallel_size(self) -> int:
        """Number of model replicas that are trained."""
        return self.topology.data

    @property
    def placement(self) -> Placement:
        """Placement of ranks on workers."""
        return Placement(self.proc_per_node)

    @property
    def nodes(self) -> int:
        """Number of workers in it."""
        return sum(group.nodes for group in self.worker_groups)

    @property
    def world_size(self) -> int:
        return sum(group.nodes * group.proc_per_node for group in self.worker_groups)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all workers."""
        return sum(group.nodes * group.gpus_per_node for group in self.worker_groups)

    def group_of(self, worker: int) -> WorkerGroup:
        """Return the group of a worker. Raises TopologyError for a worker that does not exist."""
        for group in self.worker_groups:
            if worker in group.indices:
                return group
        raise TopologyError(f"worker {worker} does not exist; there are {self.nodes}")


def derive_world(spec: Spec) -> World:
    """Derive the world of a job.

    With ``parallelism.data`` the world is derived from it; without, ``data`` is derived from nodes x procPerNode; with
    both they must agree. A missing one of nodes and procPerNode is derived, from gpusPerNode where it is set. With
    ``fbd`` the ranks of a replica are its backward and its forward ones, and with ``fbd.backwardPerForward`` that many
    replicas share forward ranks; with ``fbd.forward`` forward ranks run on separate workers, and nodes x procPerNode
    are backward ranks alone.

    Raises JobError where the numbers do not agree. `load_job` refuses such a spec before, and says which of them to
    change (`rules.world`, `rules.runtimes`).
    """
    apart = spec.fbd.forward if spec.fbd.enabled else None
    smallest = _smallest(spec)
    nodes, per_node = _workers(spec, smallest)
    topology = _topology(spec, _replicas(spec, nodes, per_node, smallest))
    fbd = _fbd_world(spec, topology)
    group = WorkerGroup(
        role=RankRole.ALL if apart is None else RankRole.BACKWARD,
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Smallest:
    """The smallest gang: one replica, or the replicas that share forward ranks."""

    replicas: int
    ranks: int
    """Its ranks on the workers that nodes and procPerNode count."""


def _smallest(spec: Spec) -> _Smallest:
    layout, served = spec.parallelism, spec.fbd.backward_per_forward if spec.fbd.enabled else 1
    trained = Topology(tensor=layout.tensor, context=layout.context, pipeline=layout.pipeline, data=served)
    fbd = _fbd_world(spec, trained)
    return _Smallest(served, trained.world_size if fbd is None or fbd.apart else fbd.world_size)


def _fbd_world(spec: Spec, trained: Topology) -> FbdWorld | None:
    """Return the ranks of both roles; None without MegaFBD. Raises JobError if its sizes do not agree."""
    if not spec.fbd.enabled:
        return None
    try:
        return FbdWorld(
            trained=trained,
            merged=spec.fbd.ignore_forward_tensor_parallel,
            backward_per_forward=spec.fbd.backward_per_forward,
            apart=spec.fbd.forward is not None,
        )
    except TopologyError as error:
        raise JobError(f"spec.fbd: {error}") from error


def _replicas(spec: Spec, nodes: int, per_node: int, smallest: _Smallest) -> int:
    data, ranks = spec.parallelism.data, nodes * per_node
    gangs = ranks // smallest.ranks
    agreed = ranks % smallest.ranks == 0 and data in {None, gangs * smallest.replicas}
    if not (agreed and nodes <= MAX_NODES and 1 <= per_node <= MAX_PROC_PER_NODE):
        whole = "replicas" if smallest.replicas == 1 else f"groups of {smallest.replicas} replicas, groups"
        raise JobError(
            f"spec.parallelism: {nodes} nodes x {per_node} ranks do not fit {whole} of {smallest.ranks} ranks and data "
            f"{data}; change one of them"
        )
    return gangs * smallest.replicas


def _topology(spec: Spec, replicas: int) -> Topology:
    layout = spec.parallelism
    sizes = {"tensor": layout.tensor, "context": layout.context, "expert": layout.expert, "pipeline": layout.pipeline}
    try:
        return Topology(**sizes, data=replicas)
    except TopologyError as error:
        raise JobError(f"spec.parallelism.{error}") from error


def _workers(spec: Spec, smallest: _Smallest) -> tuple[int, int]:
    """Return nodes and ranks of each as written or derived, even if they disagree with the rest."""
    if spec.parallelism.data is None:
        nodes = spec.nodes or 1
        return nodes, spec.proc_per_node or spec.gpus_per_node or smallest.ranks // nodes
    gangs = -(-spec.parallelism.data // smallest.replicas)
    return _spread(smallest.ranks * gangs, spec.nodes, spec.proc_per_node, spec.gpus_per_node)


def _spread(ranks: int, nodes: int | None, per_node: int | None, gpus: int) -> tuple[int, int]:
    """Distribute a number of ranks; return nodes and ranks of each."""
    free = min(gpus or ranks, ranks)
    count = nodes or max(1, ranks // (per_node or free))
    return count, per_node or (max(1, ranks // count) if nodes else free)


def _forward_group(spec: Spec, forward: ForwardWorkers, ranks: int, first: int) -> WorkerGroup:
    """Return the forward workers, numbered after the backward ones."""
    nodes, per_node = _spread(ranks, forward.nodes, forward.proc_per_node, forward.gpus_per_node)
    fits = per_node <= min(forward.gpus_per_node or MAX_PROC_PER_NODE, MAX_PROC_PER_NODE)
    if nodes * per_node != ranks or not fits or first + nodes > MAX_NODES:
        raise JobError(
            f"spec.fbd.forward: {ranks} forward ranks do not fit {nodes} nodes x {per_node} with "
            f"{forward.gpus_per_node} GPUs on each; change one of them"
        )
    return WorkerGroup(
        role=RankRole.FORWARD,
        first=first,
        nodes=nodes,
        proc_per_node=per_node,
        gpus_per_node=forward.gpus_per_node,
        node_selector=spec.node_selector if forward.node_selector is None else forward.node_selector,
        resources=spec.resources if forward.resources is None else forward.resources,
    )
