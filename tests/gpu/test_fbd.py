"""MegaFBD on GPUs: forward and backward ranks train as plain training does, to the last bit.

On two GPUs each role has one, and tensors travel between them; on one GPU both roles share it.
"""

import os
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
    "--eval-iters 0 --deterministic-mode --no-cross-entropy-loss-fusion --no-gradient-accumulation-fusion "
    "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-persist-layer-norm"
)
"""MegaFBD trains on torch's own operations, so that plain training is compared on them, too."""
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
ON_CPU = f"{SWITCH} --fbd-ship full --fbd-forward-on-cpu"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)
STAGES = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
EVALUATED = "--eval-iters 1 --eval-interval 3"
SHARED = "--ranks-per-gpu 2 --distributed-backend gloo"
CLOSE = {
    "fp32": (1, STILL, "", 1e-4, 1e-3),
    "bf16": (1, f"{STILL} --bf16 {EVALUATED}", "", 2e-3, 2e-2),
    "llama-bf16": (1, f"{STILL} --bf16 {LLAMA}", "", 2e-3, 2e-2),
    "one-for-two": (2, f"{STILL} {SHARED}", "--fbd-backward-per-forward 2", 1e-4, 1e-3),
}
"""Ranks of plain training, flags, those of MegaFBD alone, and tolerances of losses and gradient norms.

Kernels of a CPU and of a GPU sum in different orders, and in bf16 they round to different neighbours.
"""
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
    assert record(run_ranks, 2, f"{CASES[case]} {SWITCH} {SHARED}") == plain(CASES[case])


@pytest.mark.gpus(2)
def test_a_forward_gpu_serves_two_backward_ranks_of_another(run_ranks: RunRanks) -> None:
    shared = f"{CASES['fp32']} {SHARED}"
    together = record(run_ranks, 3, f"{shared} {SWITCH} --fbd-backward-per-forward 2")
    assert together == record(run_ranks, 2, shared)


@pytest.mark.parametrize("policy", ["", "--use-dpp", "--use-dpp --dpp-schedule bfc"], ids=["static", "auto", "bfc"])
@pytest.mark.parametrize(
    "is_shared", [pytest.param(True, id="one"), pytest.param(False, id="four", marks=pytest.mark.gpus(4))]
)
def test_two_stages_of_both_roles_are_bit_equal(run_ranks: RunRanks, is_shared: bool, policy: str) -> None:
    """Ranks that share a GPU take its time in turns, so that messages arrive at odd moments.

    Gloo sends no activations between stages on GPUs, so that plain training on a shared one is MegaDPP's static order.
    """
    flags = f"{CASES['bf16']} {STAGES}"
    plain, both = (f"--distributed-backend gloo --ranks-per-gpu {count}" if is_shared else "" for count in (2, 4))
    order = "--use-dpp --dpp-schedule static" if is_shared else ""
    assert record(run_ranks, 4, f"{flags} {both} {SWITCH} {policy}") == record(run_ranks, 2, f"{flags} {plain} {order}")


@pytest.mark.parametrize("case", CLOSE)
def test_forward_ranks_on_the_cpu_train_alike(run_ranks: RunRanks, case: str) -> None:
    """One GPU is enough: the backward ranks' one, or both of theirs."""
    ranks, flags, of_fbd, of_losses, of_norms = CLOSE[case]
    losses, norms = record(run_ranks, ranks, flags)
    found_losses, found_norms = record(run_ranks, ranks + 1, f"{flags} {of_fbd} {ON_CPU}")
    assert losses[0] - losses[-1] > 100 * of_losses, "training changes the loss by more than what is allowed"
    assert found_losses == pytest.approx(losses, rel=of_losses)
    assert found_norms == pytest.approx(norms, rel=of_norms)


def test_a_forward_rank_without_a_gpu_needs_a_flag(run_ranks: RunRanks) -> None:
    with pytest.raises(Exception, match="forward rank 1 has no GPU, and its backward rank 0 has one; write"):
        flags = f"{MODEL} {STILL} {SWITCH} --distributed-timeout-minutes 0.5"  # rank 0 waits for rank 1 until then
        run_ranks(2, train_without_gpu_of_forward, flags, timeout_s=PATIENCE_S)


def train_without_gpu_of_forward(flags: str) -> object:
    if os.environ["RANK"] == "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return train(flags)


def test_the_flags_that_two_ranks_on_a_gpu_need_are_named(run_ranks: RunRanks) -> None:
    with pytest.raises(Exception, match="--ranks-per-gpu 2 needs --distributed-backend gloo"):
        record(run_ranks, 2, f"{CASES['fp32']} {SWITCH} --ranks-per-gpu 2")
