"""All generators of a rank follow --seed."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --mock-data "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3"
)


def numbers_after_seeding(seed: int) -> list[tuple[float, float]]:
    """Return what Python and numpy draw after seeding, twice."""
    warnings.simplefilter("ignore")
    import numpy as np

    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import initialize_groups
    from megatronapp_trainer.parallel.seeds import seed_everything
    from megatronapp_trainer.training.build import layout_of

    config = parse(f"{FLAGS} --seed {seed}".split())
    layout = layout_of(config)
    initialize_groups(config, layout, prepare_device(layout.local_rank))
    drawn = []
    for _ in range(2):
        seed_everything(config, layout)
        drawn.append((random.random(), float(np.random.random_sample())))
    return drawn


def test_all_generators_follow_the_seed(run_ranks: RunRanks) -> None:
    (first, again), (other, _) = (run_ranks(1, numbers_after_seeding, seed)[0] for seed in (1, 2))
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]
