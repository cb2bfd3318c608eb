"""Whole microbatches that are replayed train as others, to the last bit, also while data parallelism communicates."""

from collections.abc import Callable
from typing import Any

import pytest
import replayed_training
from replayed_training import Trained

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

STEPS = 4
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    f"--train-iters {STEPS} --lr 2e-3 --lr-decay-style cosine --lr-warmup-iters 2 --mock-data --vocab-size 120 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 1 --eval-interval 2"
)
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
EIGHT = "--global-batch-size 8"
CASES = {
    "one": (1, EIGHT, [8, 8, 8], 1),
    "DP2-reduce": (2, f"{EIGHT} --overlap-grad-reduce --ddp-bucket-size 2000", [4, 4, 4], 2),
    "DP2-overlap-untied-bf16": (2, f"{EIGHT} {OVERLAP} --bf16 --untie-embeddings-and-output-weights", [4, 4, 4], 3),
    "DP2-overlap-one-microbatch": (2, f"--global-batch-size 2 {OVERLAP}", [1, 1, 1], 1),
    "DP2-overlap-growing-batch": (2, f"{EIGHT} {OVERLAP} --rampup-batch-size 2 2 8", [1, 2, 4], 3),
}
"""Ranks, flags, replayed microbatches of the steps after the first, and graphs after the last step."""


def compare(case: str) -> tuple[Trained, Trained]:
    flags = f"{MODEL} {CASES[case][1]}"
    return replayed_training.compare(flags, flags)


@pytest.mark.parametrize("case", CASES)
def test_replayed_microbatches_train_to_the_bit_as_others(run_ranks: RunRanks, case: str) -> None:
    world, _, replayed, graphs = CASES[case]
    for expected, found in run_ranks(world, compare, case):
        assert expected.losses == found.losses
        assert expected.norms == found.norms
        assert found.forwards == [0, *replayed]
        assert found.slots == (graphs,)
