"""Worlds of torch.distributed for forward and for backward ranks, in real processes."""

import dataclasses
import datetime
import os
import types
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest

from megatronapp_common.topology import fbd_world

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2 "
    "--lr 2e-3 --mock-data --vocab-size 120 --tensor-model-parallel-size 2"
)


def reduce_within_roles(*, merged: bool) -> dict[str, Any]:
    """Return role, ranks, sums over the role's world and tensor group, and what each rank wrote to the shared store."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatronapp_trainer.config import FbdConfig, parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.parallel.worlds import global_rank_of, shared_store
    from megatronapp_trainer.training.build import layout_of

    fbd = FbdConfig(forward_backward_disaggregating=True, ignore_forward_tensor_parallel=merged)
    config = dataclasses.replace(parse(MODEL.split()), fbd=fbd)
    layout = layout_of(config)
    initialize_groups(config, layout, prepare_device(layout.local_rank, 1))

    def total(group: Any = None) -> int:
        value = torch.tensor(1 << layout.global_rank)
        dist.all_reduce(value, group=group)
        return int(value)

    outcome: dict[str, Any] = {
        "role": layout.role.value,
        "rank": (dist.get_rank(), dist.get_world_size()),
        "global": (layout.global_rank, global_rank_of(layout.rank), int(os.environ["RANK"])),
        "world": total(),
        "tensor": total(parallel_state.get_tensor_model_parallel_group()),
    }
    store = shared_store()
    store.set(f"role/{layout.global_rank}", layout.role)
    outcome["seen"] = [store.get(f"role/{rank}").decode() for rank in range(layout.global_world_size)]
    destroy_groups()
    return outcome


@pytest.mark.parametrize(
    ("merged", "roles", "sums"),
    [
        (False, ["backward", "forward", "backward", "forward"], [0b0101, 0b1010, 0b0101, 0b1010]),
        (True, ["backward", "backward", "forward"], [0b011, 0b011, 0b100]),
    ],
)
def test_ranks_reduce_within_their_role_and_have_a_common_store(
    run_ranks: RunRanks, *, merged: bool, roles: list[str], sums: list[int]
) -> None:
    outcomes = run_ranks(len(roles), reduce_with_merged if merged else reduce_in_pairs)
    assert [outcome["role"] for outcome in outcomes] == roles
    assert [outcome["world"] for outcome in outcomes] == sums
    assert [outcome["tensor"] for outcome in outcomes] == sums
    assert [outcome["global"] for outcome in outcomes] == [(rank,) * 3 for rank in range(len(roles))]
    sizes = [roles.count(role) for role in roles]
    assert [outcome["rank"] for outcome in outcomes] == [
        (roles[:rank].count(role), sizes[rank]) for rank, role in enumerate(roles)
    ]
    assert all(outcome["seen"] == roles for outcome in outcomes)


def reduce_in_pairs() -> dict[str, Any]:
    return reduce_within_roles(merged=False)


def reduce_with_merged() -> dict[str, Any]:
    return reduce_within_roles(merged=True)


def leave_early_on_rank_zero() -> str:
    """Read the shared store after rank 0, which serves it, has begun to leave."""
    import torch.distributed as dist

    from megatronapp_trainer.parallel.layout import layout_from_environment
    from megatronapp_trainer.parallel.worlds import leave_role_world, shared_store, start_role_world

    layout = layout_from_environment(
        tensor_size=1, pipeline_size=1, virtual_size=1, fbd=fbd_world(tensor=1, pipeline=1, data=1)
    )
    start_role_world(layout, "gloo", datetime.timedelta(seconds=60))
    store = shared_store()
    dist.destroy_process_group()
    if layout.global_rank == 0:
        store.set("leaving", "now")
    else:
        store.set("late", store.get("leaving").decode())
    read = store.get("late" if layout.global_rank else "leaving").decode()
    leave_role_world()
    return read


def test_the_store_outlives_the_role_that_ends_first(run_ranks: RunRanks) -> None:
    assert run_ranks(2, leave_early_on_rank_zero) == ["now", "now"]


def run_without_roles() -> str:
    from megatronapp_trainer.parallel.worlds import leave_role_world, shared_store

    leave_role_world()
    try:
        shared_store()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_run_without_roles_has_no_shared_store(run_ranks: RunRanks) -> None:
    assert "the ranks of this run have no roles" in run_ranks(1, run_without_roles)[0]


@pytest.mark.parametrize("per_node", [2, 4])
def test_some_forward_rank_of_each_node_checks_and_builds_its_samples(
    monkeypatch: pytest.MonkeyPatch, per_node: int
) -> None:
    """On shared workers the first ranks of a node run backward."""
    from megatronapp_common.topology import FbdWorld, RankRole, Topology
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.parallel.layout import Layout

    with warnings.catch_warnings():  # of megatron-core
        warnings.simplefilter("ignore")
        from megatronapp_trainer.fbd import setup

    built: dict[int, Layout] = {}
    monkeypatch.setattr(setup, "build_iterators", lambda _config, layout, *_, **__: layout)
    world = FbdWorld(trained=Topology(tensor=2, pipeline=2), merged=False)
    start = types.SimpleNamespace(consumed_samples=0, order_samples=None)
    for rank in range(world.world_size):
        if world.role_of(rank) is RankRole.FORWARD:
            layout = Layout(
                rank=world.role_rank(rank),
                world_size=world.forward_ranks,
                local_rank=rank % per_node,
                tensor_size=2,
                pipeline_size=2,
                virtual_size=1,
                role=RankRole.FORWARD,
                fbd=world,
            )
            (partner,) = world.partners(rank)
            built[rank] = cast("Layout", setup._iterators(parse(MODEL.split()), layout, partner, cast("Any", start)))
    places = [[built[rank].local_rank for rank in built if rank // per_node == node] for node in range(8 // per_node)]
    assert places == [list(range(per_node // 2))] * (8 // per_node)
