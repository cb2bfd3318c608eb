"""Traced training with forward and backward ranks."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from megatronapp_common.trace import RECORD

RunRanks = Callable[..., list[Any]]
MICROBATCHES, STEPS = 4, 3
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    f"--global-batch-size {MICROBATCHES} --train-iters {STEPS} --lr 2e-3 --mock-data --vocab-size 120 "
    "--eval-iters 0 --trace --forward-backward-disaggregating"
)


def train(flags: str) -> tuple[dict[str, Any], bytes]:
    """Train on this rank. Returns metadata and records of its ring."""
    import warnings

    warnings.simplefilter("ignore")
    import megatronapp_native as native
    from megatronapp_trainer import pretrain
    from megatronapp_trainer.config import parse

    assert pretrain.pretrain(parse(f"{MODEL} {flags}".split())) == 0
    reader = native.RingReader(f"{os.environ['MEGATRONAPP_SHM_DIR']}/test.rank{os.environ['RANK']}.ring")
    data, lost = reader.read(1_000_000)
    assert lost == 0
    return json.loads(reader.info().metadata), data


def traced(run_ranks: RunRanks, world: int, flags: str, directory: pathlib.Path) -> list[tuple[Any, np.ndarray]]:
    environment = {"MEGATRONAPP_SHM_DIR": str(directory), "MEGATRONAPP_SHM_PREFIX": "test"}
    results = run_ranks(world, train, flags, environment=environment)
    return [(metadata, np.frombuffer(data, RECORD)) for metadata, data in results]
