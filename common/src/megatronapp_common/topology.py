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
    """Ranks of a training whose forward and backward run on separate ranks: their sizes and their numbers.

    A forward rank and the backward ranks that it serves, its partners, are a unit. On shared workers ranks are numbered
    unit by unit, in the order of the forward ranks: the backward ranks of a unit, then its forward rank, so that
    partners are neighbours on a node. With ``apart`` all backward ranks are first, then all forward ranks. Within each
    role the order is Megatron's, of that role's topology.

    Raises TopologyError if ``backward_per_forward`` does not divide the replicas, or is above 1 with ``merged``.
    """

    trained: Topology
    """Layout of the training, which is that of the backward ranks: its data size is the number of replicas in the
    batch."""
    merged: bool
    """True if the forward ranks of a tensor group are one (`--ignore-forward-tensor-parallel`)."""
    backward_per_forward: int = 1
    """Number of replicas whose backward ranks one forward rank serves in turns; it divides the data size."""
    apart: bool = False
    """True if forward ranks run on workers of their own."""

    def __post_init__(self) -> None:
        served = self.backward_per_forward
        if served < 1:
            raise TopologyError(f"backward_per_forward: the size is {served}; write 1 or more")
        if served > 1 and self.merged:
            raise TopologyError(
                f"backward_per_forward: {served} and merged forward ranks exclude each other: a forward rank serves "
                "the ranks of a tensor group or those of several replicas; leave one of them out"
            )
        if self.trained.data % served:
            raise TopologyError(
                f"backward_per_forward: {served} does not divide data {self.trained.data}; write a divisor of it"
            )
        self.topology_of(RankRole.FORWARD)

    @property
    def forward(self) -> Topology:
        """Layout of the forward ranks."""
        return dataclasses.replace(
            self.trained,
            tensor=1 if self.merged else self.trained.tensor,
            data=self.trained.data // self.backward_per_forward,
        )

    @property
    def backward_ranks(self) -> int:
        """Number of ranks that run backward and keep the optimizer."""
        return self.trained.world_size

    @property
    def forward_ranks(self) -> int:
        """Number of ranks that run forward only."""
        return self.trained.world_size // self.served

    @property
    def served(self) -> int:
        """Number of backward ranks that a forward rank serves."""
        return self.trained.tensor if self.merged else self.backward_per_forward

    @property
    def world_size(self) -> int:
        return self.forward_ranks + self.backward_ranks

    def topology_of(self, role: RankRole) -> Topology:
        """Return the layout of the ranks of a role. Raises TopologyError for ALL, which no rank has here."""
        if role is RankRole.ALL:
            raise TopologyError("a rank runs forward or backward here, none runs both; take one of these roles")
        return self.forward if role is RankRole.FORWARD else self.trained

    def role_of(self, rank: int) -> RankRole:
        """Return the role of a rank. Raises TopologyError outside of the world."""
        return self._place(rank)[0]

    def role_rank(self, rank: int) -> int:
        """Return the index of a rank among those of its role. Raises TopologyError outside of the world."""
        return self._place(rank)[1]

    def rank_of(self, role: RankRole, role_rank: int) -> int:
        """Return the rank with this index within its role. Raises TopologyError outside of the role's ranks."""
        count = self.topology_of(role).world_size
        if not 0 <= role_rank < count:
            raise TopologyError(f"{role} rank {role_rank} is outside of {count}; take 0 to {count - 1}")
        if self.apart:
            return role_rank + (self.backward_ranks if role is RankRole.FORWARD else 0)
        if role is RankRole.FORWARD:
            return role_rank * (self.served + 1) + self.served
        unit, place = self._place_in_unit(role_rank)
        return unit * (self.served + 1) + place

    def partners(self, rank: int) -> tuple[int, ...]:
        """Return the backward ranks that a forward rank serves, in order, or the forward rank of a backward rank."""
        role, index = self._place(rank)
        if role is RankRole.BACKWARD:
            return (self.rank_of(RankRole.FORWARD, self._place_in_unit(index)[0]),)
        served = (self._backward_in_unit(index, place) for place in range(self.served))
        return tuple(self.rank_of(RankRole.BACKWARD, backward) for backward in served)

    def _place(self, rank: int) -> tuple[RankRole, int]:
        """Return the role of a rank and its index within it."""
        if not 0 <= rank < self.world_size:
            raise _outside(rank, self.world_size)
        if self.apart:
            after = rank - self.backward_ranks
            return (RankRole.BACKWARD, rank) if after < 0 else (RankRole.FORWARD, after)
        unit, place = divmod(rank, self.served + 1)
        if place == self.served:
            return RankRole.FORWARD, unit
        return RankRole.BACKWARD, self._backward_in_unit(unit, place)

    def _place_in_unit(self, backward: int) -> tuple[int, int]:
        """Return the unit of a backward rank, which is the index of its forward rank, and its place in the unit."""
        at = self.trained.coordinates(backward)
        if self.merged:
            return self.forward.rank(cp=at.cp, dp=at.dp, pp=at.pp), at.tp
        data, place = divmod(at.dp, self.backward_per_forward)
        return self.forward.rank(tp=at.tp, cp=at.cp, dp=data, pp=at.pp), place

    def _backward_in_unit(self, unit: int, place: int) -> int:
        """Return the index of a backward rank from its place in a unit."""
        at = self.forward.coordinates(unit)
        if self.merged:
            return self.trained.rank(tp=place, cp=at.cp, dp=at.dp, pp=at.pp)
        return self.trained.rank(tp=at.tp, cp=at.cp, dp=at.dp * self.backward_per_forward + place, pp=at.pp)


def fbd_world(
    *,
    tensor: int,
    pipeline: int,
    data: int,
    merged: bool = False,
    backward_per_forward: int = 1,
    apart: bool = False,
) -> FbdWorld:
    """Return the world for the manifest's numbers: ``data`` replicas are trained, so ranks are added.

    2 x TP x PP x DP; merged: PP x DP x (TP + 1); with k backward ranks for a forward rank: TP x PP x (DP + DP / k).
    """
    return FbdWorld(
        trained=Topology(tensor=tensor, pipeline=pipeline, data=data),
        merged=merged,
        backward_per_forward=backward_per_forward,
        apart=apart,
    )


def fbd_world_of(
    world_size: int,
    *,
    tensor: int,
    pipeline: int,
    merged: bool = False,
    backward_per_forward: int = 1,
    apart: bool = False,
) -> FbdWorld:
    """Return the world for the flags' numbers: ``world_size`` ranks are started, so there are fewer replicas.

    Raises TopologyError if the ranks cannot be divided into forward and backward ones.
    """
    smallest = fbd_world(
        tensor=tensor,
        pipeline=pipeline,
        data=backward_per_forward,
        merged=merged,
        backward_per_forward=backward_per_forward,
        apart=apart,
    )
    if world_size < 1 or world_size % smallest.world_size:
        replicas = f"{backward_per_forward} replicas" if backward_per_forward > 1 else "replicas"
        details = f"tensor {tensor} x pipeline {pipeline}{', merged' if merged else ''}"
        raise TopologyError(
            f"{world_size} ranks cannot be divided into {replicas} of {smallest.world_size} forward and backward ranks "
            f"({details}); take a multiple of {smallest.world_size}"
        )
    data = world_size // smallest.world_size * backward_per_forward
    return dataclasses.replace(smallest, trained=dataclasses.replace(smallest.trained, data=data))
