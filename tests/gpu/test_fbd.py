"""MegaFBD on GPUs: forward and backward ranks train as plain training does, to the last bit.

On two GPUs each role has one, and tensors travel between them; on one GPU both roles share it.
"""

import secrets
from collections.abc import Callable
from typing import Any

import pytest
from pretrained import train

RunRanks = Callable[..., list[Any]]
Record = tuple[list[float], list[float]]

STEPS = 6
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    f"--global-batch-size 8 --train-iters {STEPS} --lr 2e-3 --lr-warmup-iters 2 --mock-data --vocab-size 120 "
    "--eval-iters 0 --deterministic-mode"
)
SWITCH = "--forward-backward-disaggregating"
STILL = "--attention-dropout 0 --hidden-dropout 0"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CASES = {
    "fp32": STILL,
    "bf16": f"{STILL} --bf16",
    "dropout-bf16": "--bf16",
    "recomputed-bf16": f"--bf16 {FULL}",
    "selective": f"{STILL} --recompute-granularity selective",
}
SHIPS = ("saved", "selective", "full")
PATIENCE_S = 120.0
"""Limit of a run, so that one that hangs is named."""


def record(run_ranks: RunRanks, world: int, flags: str) -> Record:
    """Losses and gradient norms of a run, as its reporting rank has them."""
    environment = {
        "MEGATRONAPP_JOB_UID": f"gpu-{secrets.token_hex(4)}",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
    }
    results = run_ranks(world, train, f"{MODEL} {flags}", timeout_s=PATIENCE_S, environment=environment)
    (found,) = [result for result in results if result is not None]
    assert len(found[0]) == STEPS
    return tuple(found)


@pytest.fixture(scope="module")
def plain(run_ranks: RunRanks) -> Callable[[str], Record]:
    """Record of plain training on one GPU, once for each model."""
    known: dict[str, Record] = {}

    def run(flags: str) -> Record:
        if flags not in known:
            known[flags] = record(run_ranks, 1, flags)
        return known[flags]

    return run


@pytest.mark.gpus(2)
@pytest.mark.parametrize("case", CASES)
def test_a_pair_on_two_gpus_is_bit_equal_to_plain_training(
    run_ranks: RunRanks, plain: Callable[[str], Record], case: str
) -> None:
    assert record(run_ranks, 2, f"{CASES[case]} {SWITCH}") == plain(CASES[case])


@pytest.mark.gpus(2)
@pytest.mark.parametrize("ship", SHIPS)
def test_each_mode_of_shipping_is_bit_equal(run_ranks: RunRanks, plain: Callable[[str], Record], ship: str) -> None:
    assert record(run_ranks, 2, f"{CASES['bf16']} {SWITCH} --fbd-ship {ship}") == plain(CASES["bf16"])


@pytest.mark.parametrize("case", CASES)
def test_a_pair_on_a_shared_gpu_is_bit_equal_to_plain_training(
    run_ranks: RunRanks, plain: Callable[[str], Record], case: str
) -> None:
    shared = "--ranks-per-gpu 2 --distributed-backend gloo"
    assert record(run_ranks, 2, f"{CASES[case]} {SWITCH} {shared}") == plain(CASES[case])


@pytest.mark.gpus(2)
def test_a_forward_gpu_serves_two_backward_ranks_of_another(run_ranks: RunRanks) -> None:
    shared = f"{CASES['fp32']} --ranks-per-gpu 2 --distributed-backend gloo"
    together = record(run_ranks, 3, f"{shared} {SWITCH} --fbd-backward-per-forward 2")
    assert together == record(run_ranks, 2, shared)


def test_the_flags_that_two_ranks_on_a_gpu_need_are_named(run_ranks: RunRanks) -> None:
    with pytest.raises(Exception, match="--ranks-per-gpu 2 needs --distributed-backend gloo"):
        record(run_ranks, 2, f"{CASES['fp32']} {SWITCH} --ranks-per-gpu 2")
