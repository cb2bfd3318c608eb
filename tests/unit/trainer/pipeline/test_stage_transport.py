"""Traces of megatron-core's schedules over the native transport: the records that they have over gloo."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small_training

from megatronapp_common.trace import BYTES_UNIT, RECORD, RecordKind

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
MICROBATCHES, STEPS = 6, 2
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    f"--global-batch-size {MICROBATCHES} --train-iters {STEPS} --lr 2e-3 --mock-data --vocab-size 120 --eval-iters 1 "
    "--trace --pipeline-model-parallel-size 2 --transport native"
)
MESSAGE_BYTES = 16 * 32 * 4


def train() -> bytes:
    """Train on this rank. Returns the records of its ring."""
    run = small_training.prepare(MODEL)
    import megatronapp_native as native
    from megatronapp_trainer import scan
    from megatronapp_trainer.parallel.groups import destroy_groups
    from megatronapp_trainer.scan.run_context import RunContext
    from megatronapp_trainer.training.build import build_iterators, build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    context = RunContext(
        config=run.config,
        layout=run.layout,
        device_name=run.device.name,
        chunks=run.state.chunks,
        num_microbatches=MICROBATCHES,
    )
    observer = scan.start(context)
    schedule = build_schedule(run, observer)
    iterators = build_iterators(run.config, run.layout, 0)
    trainer = Trainer(run, iterators, schedule, stop_request=StopRequest(), observer=observer)
    trainer.train()
    trainer.test()
    schedule.close()
    observer.close()
    destroy_groups()
    data, _ = native.RingReader(f"{os.environ['MEGATRONAPP_SHM_DIR']}/test.rank{run.layout.rank}.ring").read(1_000_000)
    return data


def test_posts_and_waits_of_training_are_recorded(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    environment = {"MEGATRONAPP_SHM_DIR": str(tmp_path), "MEGATRONAPP_SHM_PREFIX": "test"}
    rings = run_ranks(2, train, environment=environment)
    for data in rings:
        records = np.frombuffer(data, RECORD)
        for kind in (RecordKind.SEND_POST, RecordKind.SEND_WAIT, RecordKind.RECV_POST, RecordKind.RECV_WAIT):
            found = records[records["kind"] == int(kind)]
            assert len(found) == MICROBATCHES * STEPS, kind
            assert len({(int(record["step"]), int(record["ordinal"])) for record in found}) == len(found)
        posts = records[records["kind"] == int(RecordKind.SEND_POST)]
        assert set(posts["aux"] * BYTES_UNIT) == {MESSAGE_BYTES}
    assert not [path.name for path in tmp_path.iterdir() if "transport" in path.name]
