"""This rank's place in the parallel layout; the arithmetic is that of `megatronapp_common.topology`."""

import dataclasses
import functools
import os

from megatronapp_common.names import Env
from megatronapp_common.topology import Coordinates, FbdWorld, RankRole, Topology
from megatronapp_trainer.config import FbdConfig
from megatronapp_trainer.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the groups and the coordinates of this rank in them.

    With MegaFBD the ranks of each role are a world of their own, of which `rank`, `world_size` and all coordinates are;
    `global_rank` and `global_world_size` are those of the launcher, by which files, messages and traces name a rank.
    """

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of the node, of both roles."""
    tensor_size: int
    pipeline_size: int
    virtual_size: int
    """Model chunks of each rank; 1 if the schedule is not interleaved."""
    is_vee: bool = False
    """True if each rank's second chunk is placed in reverse order of the ranks: rank r holds the stages r and
    2P - 1 - r, and the first rank both ends of the model. Otherwise rank r holds the stages r, r + P, r + 2P, ..."""
    context_size: int = 1
    expert_size: int = 1
    role: RankRole = RankRole.ALL
    """Passes that this rank runs; all ranks of a group have the same role."""
    fbd: FbdWorld | None = None
    """The ranks of both roles with MegaFBD."""

    @functools.cached_property
    def topology(self) -> Topology:
        """Return the layout of all ranks. Raises TopologyError if its groups do not divide the world."""
        return Topology.of_world(
            self.world_size,
            tensor=self.tensor_size,
            context=self.context_size,
            expert=self.expert_size,
            pipeline=self.pipeline_size,
        )

    @property
    def global_rank(self) -> int:
        """Return the launcher's number of this rank."""
        return self.global_rank_of(self.rank)

    @property
    def global_world_size(self) -> int:
        """Return the number of ranks that the launcher started."""
        return self.world_size if self.fbd is None else self.fbd.world_size

    def global_rank_of(self, rank: int) -> int:
        """Return the launcher's number of a rank of this rank's role."""
        return rank if self.fbd is None else self.fbd.rank_of(self.role, rank)

    @property
    def trained_data_size(self) -> int:
        """Return the number of model replicas in the batch; a forward rank of MegaFBD may serve several of them."""
        return self.data_size if self.fbd is None else self.fbd.trained.data

    @functools.cached_property
    def _place(self) -> Coordinates:
        return self.topology.coordinates(self.rank)

    @property
    def data_size(self) -> int:
        """Return the number of model replicas."""
        return self.topology.data

    @property
    def tensor_rank(self) -> int:
        """Return the place in the tensor group."""
        return self._place.tp

    @property
    def context_rank(self) -> int:
        """Return the place in the context group."""
        return self._place.cp

    @property
    def expert_rank(self) -> int:
        """Return the place in the expert group."""
        return self._place.ep

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's model replica."""
        return self._place.dp

    @property
    def pipeline_rank(self) -> int:
        """Return the pipeline stage of this rank."""
        return self._place.pp

    def place_in_loop(self, chunk: int) -> int:
        """Return the pipeline rank that holds this rank's chunk where stages are not in a vee.

        megatron-core derives from it which layers a chunk has.
        """
        if self.is_vee and chunk == 1:
            return self.pipeline_size - 1 - self.pipeline_rank
        return self.pipeline_rank

    @property
    def is_first_stage(self) -> bool:
        """Return True if this rank has the embedding, in its first chunk."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Return True if this rank computes the loss, in its last chunk."""
        return self.place_in_loop(self.virtual_size - 1) == self.pipeline_size - 1

    def gpu_place(self, fbd: FbdConfig) -> int | None:
        """Return the index among the ranks of the node that use its GPUs; None if this rank runs on the CPU."""
        if not fbd.fbd_forward_on_cpu:
            return self.local_rank
        return None if self.role is RankRole.FORWARD else self.local_rank_in_role

    @property
    def local_rank_in_role(self) -> int:
        """Return the index among the ranks of the node that have this rank's role."""
        if self.fbd is None:
            return self.local_rank
        before = range(self.global_rank - self.local_rank, self.global_rank)
        return [self.fbd.role_of(rank) for rank in before].count(self.role)

    @property
    def is_reporter(self) -> bool:
        """Return True on the one rank that logs: the last of a pipeline, first of tensor, context and data group.

        It is no forward rank: those have neither gradients nor a learning rate.
        """
        is_last = self.role.has_optimizer and self.pipeline_rank == self.pipeline_size - 1
        return is_last and self.tensor_rank == self.context_rank == self.data_rank == 0


def environment_integer(name: str, default: int) -> int:
    """Read an integer that the launcher set in the environment. Raises UsageError if it is not an integer."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"the variable {name} is {text!r}; the launcher must set it to an integer") from error


def check_divides(world_size: int, *, tensor_size: int, pipeline_size: int, context_size: int = 1) -> None:
    """Raise UsageError if a world is not made of whole replicas. The sizes of groups are above 0."""
    if world_size < 1:
        raise UsageError(f"{world_size} ranks cannot train; start 1 or more")
    replica = tensor_size * context_size * pipeline_size
    if world_size % replica:
        context = f"--context-parallel-size {context_size} x " if context_size > 1 else ""
        raise UsageError(
            f"{world_size} ranks cannot be divided into --tensor-model-parallel-size {tensor_size} x {context}"
            f"--pipeline-model-parallel-size {pipeline_size}; start a multiple of {replica} ranks"
        )


def _checked_role(role: RankRole, rank: int) -> RankRole:
    """Return the role. Raises UsageError if the launcher has given the rank another one."""
    given = os.environ.get(Env.RANK_ROLE, role)
    if given != role:
        raise UsageError(
            f"rank {rank} is a {role} rank by its flags, but {Env.RANK_ROLE} of its launcher is {given!r}; give "
            "launchers and ranks the same flags"
        )
    return role


def layout_from_environment(
    *,
    tensor_size: int,
    pipeline_size: int,
    virtual_size: int,
    is_vee: bool = False,
    context_size: int = 1,
    expert_size: int = 1,
    fbd: FbdWorld | None = None,
) -> Layout:
    """Return the layout of this process from RANK, WORLD_SIZE and LOCAL_RANK; one process where they are absent.

    With `fbd`, the ranks of both roles, it is that of this process's role. Raises UsageError if the groups do not
    divide the world.
    """
    rank, world, role = environment_integer("RANK", 0), environment_integer("WORLD_SIZE", 1), RankRole.ALL
    if fbd is not None:
        role, rank = _checked_role(fbd.role_of(rank), rank), fbd.role_rank(rank)
        tensor_size, world = fbd.topology_of(role).tensor, fbd.topology_of(role).world_size
    check_divides(world, tensor_size=tensor_size, pipeline_size=pipeline_size, context_size=context_size)
    return Layout(
        rank=rank,
        world_size=world,
        local_rank=environment_integer("LOCAL_RANK", 0),
        tensor_size=tensor_size,
        pipeline_size=pipeline_size,
        virtual_size=virtual_size,
        is_vee=is_vee,
        context_size=context_size,
        expert_size=expert_size,
        role=role,
        fbd=fbd,
    )
