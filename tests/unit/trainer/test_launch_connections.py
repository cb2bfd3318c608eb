"""Hardware queues of a device that the launcher gives the ranks, and NCCL's registration of buffers in graphs."""

import pytest

from megatronapp_common.topology import RankRole
from megatronapp_trainer.launch.config.interface import WorkerAddress
from megatronapp_trainer.launch.ranks.connections import device_connections
from megatronapp_trainer.launch.ranks.environment import rank_environment
from megatronapp_trainer.launch.rendezvous.messages import JoinRequest
from megatronapp_trainer.launch.rendezvous.rank_table import build_table

PLACE = WorkerAddress(address="10.0.0.1", listen_address="10.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "connections"),
    [
        ([], "1"),
        (["--pipeline-model-parallel-size", "2"], "1"),
        (["--use-dpp", "--pipeline-model-parallel-size", "2"], "8"),
        (["--use-dpp", "--tensor-model-parallel-size", "1"], "8"),
        (["--use-dpp", "--tensor-model-parallel-size=2"], "1"),
        (["--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-dpp"], "1"),
        (["--use-dpp", "--tensor-model-parallel-size", "2", "--tensor-model-parallel-size", "1"], "8"),
        (["--use-dpp", "--tensor-model-parallel-size"], "1"),
        (["--forward-backward-disaggregating"], "8"),
        (["--forward-backward-disaggregating", "--tensor-model-parallel-size", "2"], "1"),
        (["--use-dpp-not-a-flag", "--dpp-schedule", "auto"], "1"),
    ],
)
def test_tasks_may_wait_on_their_device_unless_megatron_core_needs_kernels_in_order(
    arguments: list[str], connections: str
) -> None:
    join = JoinRequest(uid="u", attempt=1, index=0, address="10.0.0.1", node="n", num_ranks=1, port=1)
    table = build_table([join])
    given: dict[str, str] = {}
    made = rank_environment(given, table, worker=0, local_rank=0, place=PLACE, arguments=arguments)
    assert made["CUDA_DEVICE_MAX_CONNECTIONS"] == connections
    given["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    made = rank_environment(given, table, worker=0, local_rank=0, place=PLACE, arguments=arguments)
    assert made["CUDA_DEVICE_MAX_CONNECTIONS"] == "32", "the user's value stays"


def test_copies_of_a_forward_rank_hold_up_none_of_its_passes() -> None:
    flags = ["--forward-backward-disaggregating", "--tensor-model-parallel-size", "2"]
    assert device_connections(flags, RankRole.FORWARD) == "8"
    assert device_connections(flags, RankRole.BACKWARD) == "1", "with tensor parallelism kernels start in order"


@pytest.mark.parametrize(
    ("given", "registration"),
    [
        ({}, None),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "0"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}, "0"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"}, "1"),
    ],
)
def test_nccl_registers_no_expandable_memory_of_graphs(given: dict[str, str], registration: str | None) -> None:
    join = JoinRequest(uid="u", attempt=1, index=0, address="10.0.0.1", node="n", num_ranks=1, port=1)
    made = rank_environment(given, build_table([join]), worker=0, local_rank=0, place=PLACE)
    assert made.get("NCCL_GRAPH_REGISTER") == registration
