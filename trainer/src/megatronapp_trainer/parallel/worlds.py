"""Worlds of torch.distributed for the roles of MegaFBD, and the store that the ranks of both roles share.

Forward ranks form a world, and backward ranks form another one, so that megatron-core builds the groups of each as in
plain training. Rank 0 of the launcher serves one store for both; under torchrun its agent does.
"""

import dataclasses
import datetime

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatronapp_trainer.parallel.layout import Layout

_LEAVING, _ALL_LEFT = "worlds/leaving", "worlds/all-left"


@dataclasses.dataclass(frozen=True, slots=True)
class RoleWorld:
    """The world of this process's role, with the store of both roles."""

    store: Store
    layout: Layout


_worlds: list[RoleWorld] = []
"""The world of this process, from `start_role_world` to `leave_role_world`; empty without roles."""


def start_role_world(layout: Layout, backend: str, timeout: datetime.timedelta) -> None:
    """Start torch.distributed among the ranks of this rank's role; collective over them."""
    launched = layout.global_rank, layout.global_world_size
    store, _, _ = next(rendezvous("env://", *launched, timeout=timeout))
    store.set_timeout(timeout)
    own = PrefixStore(f"worlds/{layout.role}", store)
    dist.init_process_group(backend, store=own, rank=layout.rank, world_size=layout.world_size, timeout=timeout)
    _worlds.append(RoleWorld(store, layout))


def shared_store() -> Store:
    """Return the store of the ranks of both roles. Raises RuntimeError without roles."""
    if not _worlds:
        raise RuntimeError("the ranks of this run have no roles, and so no store for both; start_role_world makes one")
    return PrefixStore("worlds/shared", _worlds[-1].store)


def control_store() -> Store:
    """Return the store in which all ranks of the job find each other for orders, with roles and without."""
    own = _worlds[-1].store if _worlds else dist.distributed_c10d._get_default_store()
    return PrefixStore("worlds/control", own)


def global_rank_of(rank: int) -> int:
    """Return the launcher's number of a rank of torch.distributed."""
    return _worlds[-1].layout.global_rank_of(rank) if _worlds else rank


def leave_role_world() -> None:
    """Leave the store; rank 0, which serves it, waits until all ranks of both roles have left. Nothing without roles.

    A role that has ended must not take the store from the other one, which may still start or exchange something.
    """
    if not _worlds:
        return
    world = _worlds.pop()
    if world.store.add(_LEAVING, 1) == world.layout.global_world_size:
        world.store.set(_ALL_LEFT, "")
    if world.layout.global_rank == 0:
        world.store.wait([_ALL_LEFT])
