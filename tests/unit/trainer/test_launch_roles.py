"""Roles of MegaFBD in the launchers' rank table and in the environment of a rank."""

import json

import pytest

from megatronapp_common.names import Env, RankOrder
from megatronapp_common.topology import RankRole, fbd_world
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.launch.config.interface import WorkerAddress
from megatronapp_trainer.launch.ranks.environment import rank_environment
from megatronapp_trainer.launch.ranks.roles import fbd_world_of_flags
from megatronapp_trainer.launch.rendezvous.messages import JoinRequest
from megatronapp_trainer.launch.rendezvous.rank_table import RankTable, build_table
from megatronapp_trainer.parallel.layout import layout_from_environment

PLACE = WorkerAddress(address="10.0.0.2", listen_address="10.0.0.2")


def join(index: int, *, ranks: int) -> JoinRequest:
    return JoinRequest(uid="u", attempt=0, index=index, address="10.0.0.1", node="n", num_ranks=ranks, port=1)


def test_a_worker_with_ranks_of_both_roles_has_the_role_of_each_device() -> None:
    flags = ["--forward-backward-disaggregating", "--fbd-backward-per-forward=2"]
    joins = [join(0, ranks=3), join(1, ranks=3)]
    table = build_table(joins, RankOrder.INDEX, fbd_world_of_flags(flags, 6))
    backward, forward = RankRole.BACKWARD, RankRole.FORWARD
    assert [entry.roles for entry in table.workers] == [(backward, backward, forward)] * 2
    document = json.loads(json.dumps(table.to_json()))
    assert document["workers"][1]["roles"] == ["backward", "backward", "forward"]
    assert RankTable.from_json(document) == table
    made = [rank_environment({}, table, worker=1, local_rank=rank, place=PLACE) for rank in range(3)]
    assert [(each["LOCAL_RANK"], each["RANK"], each[Env.RANK_ROLE]) for each in made] == [
        ("0", "3", "backward"),
        ("1", "4", "backward"),
        ("2", "5", "forward"),
    ]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--fbd-backward-per-forward", "2"],
        ["--forward-backward-disaggregating", "--tensor-model-parallel-size", "many"],
        ["--forward-backward-disaggregating", "--tensor-model-parallel-size", "4"],
        ["--forward-backward-disaggregating", "--ignore-forward-tensor-parallel", "--fbd-backward-per-forward", "2"],
    ],
)
def test_a_table_has_no_roles_without_fbd_or_with_flags_that_the_ranks_refuse(flags: list[str]) -> None:
    table = build_table([join(0, ranks=6)], RankOrder.INDEX, fbd_world_of_flags(flags, 6))
    assert table.workers[0].roles == ()
    assert Env.RANK_ROLE not in rank_environment({}, table, worker=0, local_rank=0, place=PLACE)


def test_a_rank_whose_launcher_read_other_flags_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", Env.RANK_ROLE: "backward"}.items():
        monkeypatch.setenv(name, value)
    world = fbd_world(tensor=1, pipeline=1, data=1)
    with pytest.raises(UsageError, match="rank 1 is a forward rank by its flags, but MEGATRONAPP_RANK_ROLE"):
        layout_from_environment(tensor_size=1, pipeline_size=1, virtual_size=1, fbd=world)
