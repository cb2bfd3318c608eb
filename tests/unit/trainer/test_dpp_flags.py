"""Flags of MegaDPP: which are taken and refused, and MegatronApp's flags about nodes against the rank table."""

import re
import shlex
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.config.checks import check_world
from megatronapp_trainer.config.dpp import DppConfig
from megatronapp_trainer.errors import UsageError, UsageErrors
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.parallel.node_flags import check_node_flags, is_own_address
from megatronapp_trainer.utils.byte_sizes import bytes_of, bytes_text

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data --vocab-size 128"
)
PIPED = "--pipeline-model-parallel-size 2"
VEE = "--use-dpp --dpp-schedule zero-bubble --num-virtual-stages-per-pipeline-rank 2"
GUIDED = "--use-dpp --dpp-placement vee --num-virtual-stages-per-pipeline-rank 2"


def parsed(flags: str) -> TrainerConfig:
    return parse(shlex.split(f"{SMALL} {flags}"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-dpp", "--use-dpp needs --pipeline-model-parallel-size above 1"),
        (f"{PIPED} --dpp-schedule dfc", "--dpp-schedule needs --use-dpp"),
        (f"{PIPED} --dpp-memory-cap 2", "--dpp-memory-cap needs --use-dpp"),
        (f"{PIPED} --workload 2", "--workload needs --use-dpp or --transport native"),
        (f"{PIPED} --use-dpp --workload 0", "--workload 0: give the number of threads"),
        (f"{PIPED} --use-dpp --workload 1048576", "in MegatronApp it was the number of elements for each thread"),
        (f"{PIPED} --use-dpp --dpp-memory-cap 0", "--dpp-memory-cap 0: give a number of microbatches, 1 or more"),
        (f"{PIPED} --use-dpp --dpp-memory-cap 8GB", "--dpp-memory-cap 8GB: give a number of microbatches"),
        (f"{PIPED} --use-dpp --dpp-schedule static --dpp-memory-cap 2", "whose order is fixed; leave it out"),
        (
            f"{PIPED} --use-dpp --dpp-schedule zero-bubble --num-layers 6 --num-virtual-stages-per-pipeline-rank 3",
            "zero-bubble has one chunk on each rank (ZB-H1) or two (ZB-V), not 3",
        ),
        (f"{PIPED} {VEE} --decoder-last-pipeline-num-layers 2", "both ends of the model on the first rank"),
        (f"{PIPED} {GUIDED} --decoder-first-pipeline-num-layers 2", "both ends of the model on the first rank"),
        (f"{PIPED} --dpp-placement vee", "--dpp-placement needs --use-dpp"),
        (
            f"{PIPED} --use-dpp --dpp-placement vee",
            "--dpp-placement vee has two chunks on each rank, not 1; give --num",
        ),
        (
            f"{PIPED} {GUIDED} --dpp-schedule dfc",
            "no order of --dpp-schedule dfc; take --dpp-schedule auto or zero-bub",
        ),
        (f"{PIPED} {GUIDED} --dpp-schedule static", "or leave the placement out"),
        (f"{PIPED} {VEE} --dpp-placement loop", "whose stages are in a vee; leave the placement out"),
        (f"{PIPED} --use-dpp --transport nccl", "--transport nccl cannot carry --use-dpp"),
        ("--transport native", "--transport native needs --pipeline-model-parallel-size above 1"),
        (f"{PIPED} --transport nccl --distributed-backend gloo", "exclude each other"),
        ("--transport ucx", "invalid choice: 'ucx'"),
        ("--num-gpus 0", "--num-gpus 0 must be 1 or more"),
        ("--node-ips node-0,node-1", "'node-0' is not an IP address"),
        ("--node-ips 10.0.0.1,", "'' is not an IP address"),
    ],
)
def test_flags_of_megadpp_without_meaning_are_refused(flags: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parsed(flags)


@pytest.mark.parametrize(
    "flags",
    [
        f"{PIPED} --use-dpp --transport auto --workload 64 --multi-node --num-gpus 4 --node-ips 10.0.0.1,fd00::1",
        f"{PIPED} --use-dpp --transport native --dpp-schedule bfc --dpp-memory-cap 3",
        f"{PIPED} {VEE}",
        f"{PIPED} {VEE} --dpp-placement vee",
        f"{PIPED} {GUIDED} --dpp-memory-cap 2",
        f"{PIPED} --use-dpp --dpp-schedule zero-bubble --dpp-placement loop",
        f"{PIPED} --transport nccl",
        f"{PIPED} --transport native --workload 2",
        "--multi-node --num-gpus 4 --node-ips 127.0.0.1",
    ],
)
def test_flags_of_megadpp_are_taken(flags: str) -> None:
    parsed(flags)


def test_a_memory_cap_is_a_number_of_microbatches_or_a_size() -> None:
    caps = {text: parsed(f"{PIPED} --use-dpp --dpp-memory-cap {text}").dpp for text in ("12", "8Gi", "300KiB")}
    assert [cap.memory_cap_microbatches for cap in caps.values()] == [12, None, None]
    assert [cap.memory_cap_bytes for cap in caps.values()] == [None, 8 << 30, 300 << 10]


@given(st.integers(1, 1 << 50))
def test_the_text_of_a_size_is_never_too_small(size: int) -> None:
    read = bytes_of(bytes_text(size))
    assert read is not None
    assert size <= read < max(size * 1.01, size + 1024)


def test_two_chunks_in_a_vee_take_any_number_of_microbatches() -> None:
    odd = f"{PIPED} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6"
    check_world(parsed(f"{odd} --use-dpp --dpp-schedule zero-bubble"), 1)
    check_world(parsed(f"{odd} --use-dpp --dpp-placement vee"), 1)
    with pytest.raises(UsageError, match="the interleaved schedule needs a multiple"):
        check_world(parsed(odd), 1)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--node-ips 10.0.0.1,10.0.0.2", "--node-ips: 2 addresses for 4 ranks; give one for each rank"),
        ("--num-gpus 8", "--num-gpus 8: there are 4 ranks in all"),
    ],
)
def test_flags_about_nodes_must_fit_the_world(flags: str, problem: str) -> None:
    config = parsed(f"--pipeline-model-parallel-size 2 {flags}")
    with pytest.raises(UsageError, match=re.escape(problem)):
        check_world(config, 2)


LAYOUT = Layout(rank=2, world_size=4, local_rank=0, tensor_size=1, pipeline_size=2, virtual_size=1)
TWO_NODES = {"LOCAL_WORLD_SIZE": "2", "MEGATRON_NODE_IPS": "10.0.0.2,10.0.0.2,10.0.0.1,10.0.0.1"}
SAME_NODE = {"LOCAL_WORLD_SIZE": "4", "MEGATRON_NODE_IPS": "10.0.0.2,10.0.0.2,10.0.0.2,10.0.0.2"}
TORCHRUN = {"LOCAL_WORLD_SIZE": "2"}
IPS = TWO_NODES["MEGATRON_NODE_IPS"]


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        (DppConfig(), {}),
        (DppConfig(num_gpus=2, multi_node=True, node_ips=IPS), TWO_NODES),
        (DppConfig(node_ips=IPS.replace(",", ", ")), TWO_NODES),
        (DppConfig(num_gpus=4, node_ips=SAME_NODE["MEGATRON_NODE_IPS"]), SAME_NODE),
        (DppConfig(num_gpus=2, multi_node=True, node_ips="10.0.0.9,10.0.0.9,10.0.0.1,10.0.0.1"), TORCHRUN),
    ],
)
def test_flags_that_are_right_are_accepted(flags: DppConfig, environment: dict[str, str]) -> None:
    check_node_flags(flags, LAYOUT, environment, is_own=lambda address: address == "10.0.0.1")


@pytest.mark.parametrize(
    ("flags", "environment", "problems"),
    [
        (
            DppConfig(num_gpus=4, multi_node=True),
            TWO_NODES,
            ["--num-gpus 4: the node of rank 2 has 2 ranks; give 2, or leave it out"],
        ),
        (
            DppConfig(num_gpus=2, multi_node=True),
            SAME_NODE,
            [
                "--num-gpus 2: the node of rank 2 has 4 ranks; give 4, or leave it out",
                "--multi-node: all 4 ranks are on one node; leave it out",
            ],
        ),
        (
            DppConfig(num_gpus=2),
            {},
            ["--num-gpus and --multi-node cannot be checked: LOCAL_WORLD_SIZE is not set; leave them out"],
        ),
        (
            DppConfig(node_ips="10.0.0.2,10.0.0.1,10.0.0.2,10.0.0.1"),
            TWO_NODES,
            [f"--node-ips: rank 1 is at 10.0.0.2, not at 10.0.0.1; leave it out, or give {IPS}"],
        ),
        (
            DppConfig(node_ips=IPS),
            TORCHRUN,
            ["--node-ips: rank 2 is not at 10.0.0.1, which no interface of its machine has; leave it out"],
        ),
    ],
)
def test_flags_that_are_wrong_are_refused_with_what_is_right(
    flags: DppConfig, environment: dict[str, str], problems: list[str]
) -> None:
    with pytest.raises(UsageErrors) as caught:
        check_node_flags(flags, LAYOUT, environment, is_own=lambda _address: False)
    assert list(caught.value.problems) == problems


def test_own_addresses_are_recognised() -> None:
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.1")  # TEST-NET-1 of RFC 5737: no machine has it


def refusal_of_groups(flags: str) -> str:
    """Error of a rank without a device as it starts its process groups."""
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import initialize_groups

    with pytest.raises(UsageError) as caught:
        initialize_groups(parsed(flags), LAYOUT, prepare_device(0))
    return str(caught.value)


@pytest.mark.torch
def test_nccl_is_refused_where_transfers_go_through_gloo(run_ranks: Callable[..., list[str]]) -> None:
    (error,) = run_ranks(1, refusal_of_groups, f"{PIPED} --transport nccl")
    assert error == "--transport nccl: this rank has no GPU, and its transfers go through gloo; leave it out"


@pytest.mark.torch
def test_gpus_are_refused_before_groups_are_built() -> None:
    import torch

    from megatronapp_trainer.device import Device
    from megatronapp_trainer.parallel.groups import initialize_groups

    gpu = Device(torch_device=torch.device("cuda", 0), name="a GPU")
    with pytest.raises(UsageError, match="--transport native carries tensors of the CPU only so far"):
        initialize_groups(parsed(f"{PIPED} --transport native"), LAYOUT, gpu)
