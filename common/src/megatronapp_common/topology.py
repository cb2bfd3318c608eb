"""Rank arithmetic: coordinates, process groups and workers of ranks.

Order of Megatron-core's default, ``tp-cp-ep-dp-pp``: tensor fastest, pipeline slowest. World = TP x CP x DP x PP.
Experts cut the same world a second time: EP runs over CP x DP, so ``ep`` follows from (cp, dp) and is no factor of the
world. Checked against ``megatron.core.parallel_state.RankGenerator`` in the tests.
"""

import bisect
import dataclasses
import enum
import itertools

from megatronapp_common.errors import TopologyError


class Group(enum.StrEnum):
    """Kinds of process groups. A value names the coordinates that vary within the group, in Megatron's order."""

    TENSOR = "tp"
    CONTEXT = "cp"
    DATA = "dp"
    PIPELINE = "pp"
    DATA_CONTEXT = "dp-cp"
    """Data and context ranks, over which gradients are reduced."""
    MODEL = "tp-pp"
    """The ranks of one replica (of one context slice)."""
    TENSOR_CONTEXT = "tp-cp"
    TENSOR_DATA = "tp-dp"
    TENSOR_DATA_CONTEXT = "tp-dp-cp"
    EXPERT = "ep"
    EXPERT_DATA = "edp"
    """Replicas of experts, over which their gradients are reduced."""
    EXPERT_TENSOR = "tp-ep"
    EXPERT_TENSOR_PIPELINE = "tp-ep-pp"
    EMBEDDING = "embed"
    """First and last stage, which share tied embeddings; one rank with a single stage."""
    POSITION_EMBEDDING = "pos-embed"
    """The first stage, which alone holds learned positions."""


class RankRole(enum.StrEnum):
    """Passes that a rank runs, or that the ranks of a worker run."""

    ALL = "all"
    """Forward and backward; with MegaFBD on shared workers the trainer assigns the roles."""
    BACKWARD = "backward"
    """Backward only: MegaFBD with separate forward workers."""
    FORWARD = "forward"
    """Forward only, on separate workers of MegaFBD."""

    @property
    def has_optimizer(self) -> bool:
        """True if the rank updates weights; a forward rank receives them."""
        return self is not RankRole.FORWARD


_EXPERT_GROUPS = frozenset(
    {Group.EXPERT, Group.EXPERT_DATA, Group.EXPERT_TENSOR, Group.EXPERT_TENSOR_PIPELINE}
)  # these see the world as tp x ep x edp x pp, all others as tp x cp x dp x pp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Coordinates of one rank in every dimension."""

    tp: int
    cp: int
    ep: int
    dp: int
    pp: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Sizes of a parallel layout. Raises TopologyError for sizes below 1 and for experts that do not divide CP x DP."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise TopologyError(f"{field.name}: the size is {size}; write 1 or more")
        if self.context * self.data % self.expert:
            raise TopologyError(
                f"expert: {self.expert} does not divide context {self.context} x data {self.data} = "
                f"{self.context * self.data}; write a divisor of it"
            )

    @classmethod
    def of_world(
        cls, world_size: int, *, tensor: int = 1, context: int = 1, expert: int = 1, pipeline: int = 1
    ) -> "Topology":
        """Return the layout that fills ``world_size`` ranks with replicas. Raises TopologyError if they do not fit."""
        replica = cls(tensor=tensor, context=context, pipeline=pipeline).world_size
        if world_size < 1 or world_size % replica:
            raise TopologyError(
                f"{world_size} ranks cannot be divided into replicas of {replica} "
                f"(tensor {tensor} x context {context} x pipeline {pipeline}); take a multiple of {replica}"
            )
        return cls(tensor=tensor, context=context, expert=expert, data=world_size // replica, pipeline=pipeline)

    @property
    def world_size(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def expert_data(self) -> int:
        """Number of replicas of each expert."""
        return self.context * self.data // self.expert

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank. Raises TopologyError outside of the world."""
        if not 0 <= rank < self.world_size:
            raise _outside(rank, self.world_size)
        rest, tp = divmod(rank, self.tensor)
        pp, replica = divmod(rest, self.context * self.data)
        dp, cp = divmod(replica, self.context)
        return Coordinates(tp=tp, cp=cp, ep=replica % self.expert, dp=dp, pp=pp)

    def rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at these coordinates; ``ep`` follows from cp and dp. Raises TopologyError outside a size."""
        for name, value, size in (
            ("tp", tp, self.tensor),
            ("cp", cp, self.context),
            ("dp", dp, self.data),
            ("pp", pp, self.pipeline),
        ):
            if not 0 <= value < size:
                raise TopologyError(f"{name} {value} is outside of its {size} ranks; take 0 to {size - 1}")
        return tp + self.tensor * (cp + self.context * (dp + self.data * pp))

    def groups(self, kind: Group) -> tuple[tuple[int, ...], ...]:
        """Return all groups of a kind, in Megatron's order: by their first member; members ascend."""
        everyone = (self.group_of(kind, rank) for rank in range(self.world_size))
        return tuple(group for rank, group in enumerate(everyone) if group[:1] == (rank,))

    def group_of(self, kind: Group, rank: int) -> tuple[int, ...]:
        """Return the members of ``rank``'s group of a kind; empty if it is in none (embeddings)."""
        if kind is Group.EMBEDDING or kind is Group.POSITION_EMBEDDING:
            stages = self.group_of(Group.PIPELINE, rank)
            members = stages[:1] if kind is Group.POSITION_EMBEDDING else tuple(dict.fromkeys((stages[0], stages[-1])))
            return members if rank in members else ()
        self.coordinates(rank)
        varying = kind.value.split("-")
        first, offsets, stride = rank, [0], 1
        for name, size in self._dimensions(kind):
            if name in varying:
                first -= rank // stride % size * stride
                offsets = [place * stride + offset for place in range(size) for offset in offsets]
            stride *= size
        return tuple(first + offset for offset in offsets)

    def _dimensions(self, kind: Group) -> tuple[tuple[str, int], ...]:
        """Return names and sizes of the dimensions in which a kind sees the world, fastest first."""
        if kind in _EXPERT_GROUPS:
            return (("tp", self.tensor), ("ep", self.expert), ("edp", self.expert_data), ("pp", self.pipeline))
        return (("tp", self.tensor), ("cp", self.context), ("dp", self.data), ("pp", self.pipeline))


def _outside(rank: int, world_size: int) -> TopologyError:
    return TopologyError(f"rank {rank} is outside of this world of {world_size}; take 0 to {world_size - 1}")


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of ranks to workers: ranks are numbered in worker order, and workers may have unequal counts."""

    proc_per_node: tuple[int, ...]
    """Number of ranks of each worker."""

    def __post_init__(self) -> None:
        if not self.proc_per_node or min(self.proc_per_node) < 1:
            raise TopologyError(f"ranks per worker are {list(self.proc_per_node)}; every worker needs 1 or more")

    @property
    def world_size(self) -> int:
        return sum(self.proc_per_node)

    def worker_of(self, rank: int) -> int:
        """Return the worker that runs a rank. Raises TopologyError outside of the world."""
        if not 0 <= rank < self.world_size:
            raise _outside(rank, self.world_size)
        return bisect.bisect_right(list(itertools.accumulate(self.proc_per_node)), rank)

    def ranks_of(self, worker: int) -> range:
        """Return the ranks of a worker. Raises TopologyError for a worker that does not exist."""
        if not 0 <= worker < len(self.proc_per_node):
            raise TopologyError(f"worker {worker} does not exist; there are {len(self.proc_per_node)}")
        first = sum(self.proc_per_node[:worker])
        return range(first, first + self.proc_per_node[worker])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FbdWorld:
    """Sizes of a training whose forward and backward run on separate ranks."""

    trained: Topology
    """Layout of the training: its data size is the number of replicas in the batch."""
    merged: bool
    """True if the forward ranks of a tensor group are one (`--ignore-forward-tensor-parallel`)."""

    @property
    def backward_ranks(self) -> int:
        """Number of ranks that run backward and keep the optimizer."""
        return self.trained.world_size

    @property
    def forward_ranks(self) -> int:
        """Number of ranks that run forward only."""
        return self.trained.world_size // (self.trained.tensor if self.merged else 1)

    @property
    def world_size(self) -> int:
        return self.forward_ranks + self.backward_ranks


def fbd_world(*, tensor: int, pipeline: int, data: int, merged: bool = False) -> FbdWorld:
    """Return the world for the manifest's numbers: ``data`` replicas are trained, so ranks double.

    2 x TP x PP x DP; merged: PP x DP x (TP + 1).
    """
    return FbdWorld(trained=Topology(tensor=tensor, pipeline=pipeline, data=data), merged=merged)


def fbd_world_of(world_size: int, *, tensor: int, pipeline: int, merged: bool = False) -> FbdWorld:
    """Return the world for the flags' numbers: ``world_size`` ranks are started, so replicas halve.

    Raises TopologyError if the ranks cannot be divided into forward and backward ones.
    """
    replica = fbd_world(tensor=tensor, pipeline=pipeline, data=1, merged=merged).world_size
    if world_size < 1 or world_size % replica:
        raise TopologyError(
            f"{world_size} ranks cannot be divided into replicas of {replica} forward and backward ranks "
            f"(tensor {tensor} x pipeline {pipeline}{', merged' if merged else ''}); take a multiple of {replica}"
        )
    return fbd_world(tensor=tensor, pipeline=pipeline, data=world_size // replica, merged=merged)
