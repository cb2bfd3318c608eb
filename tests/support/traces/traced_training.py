"""Traced trainings of ranks on CPUs: their losses, and what their rings hold at the end."""

import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from pytest_workers import FULL

from megatronapp_common.trace import RECORD

RunRanks = Callable[..., list[Any]]
STEPS = 6
MICROBATCHES = 4 if FULL else 2
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    f"--train-iters {STEPS} --lr 2e-3 --mock-data --vocab-size 120 --attention-dropout 0 --hidden-dropout 0 "
    "--eval-iters 0 --use-distributed-optimizer"
)


class Losses:
    """A reporter that keeps the losses."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def step(self, metrics: Any, **_details: object) -> None:
        self.values.append(metrics.loss)

    def state(self, state: str) -> None:
        pass


def train(flags: list[str]) -> dict[str, Any]:
    """Train on this rank; its losses, and what its ring holds at the end."""
    warnings.simplefilter("ignore")
    import os

    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import destroy_groups, initialize_groups
    from megatronapp_trainer.scan.run_context import RunContext
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule, layout_of, vocab_size_of
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    config = parse([*MODEL.split(), *flags])
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    run = build_run(config, layout, device, vocab_size=vocab_size_of(config))
    observer = None
    if config.logging.trace:
        from megatronapp_trainer import scan

        observer = scan.start(
            RunContext(
                config=config,
                layout=layout,
                device_name=device.name,
                chunks=run.state.chunks,
                num_microbatches=MICROBATCHES,
            )
        )
    losses, schedule = Losses(), build_schedule(run, observer)
    Trainer(
        run,
        build_iterators(config, layout, 0),
        schedule,
        stop_request=StopRequest(),
        reporter=losses,  # type: ignore[arg-type]
        observer=observer,
    ).train()
    schedule.close()
    if observer is not None:
        observer.close()
    destroy_groups()
    return {"losses": losses.values, **ring_of(layout.rank, pathlib.Path(os.environ["MEGATRONAPP_SHM_DIR"]))}


def ring_of(rank: int, directory: pathlib.Path) -> dict[str, Any]:
    """Metadata, records and loss of records of a rank's ring, where there is one."""
    path = directory / f"test.rank{rank}.ring"
    if not path.exists():
        return {}
    import megatronapp_native as native

    reader = native.RingReader(str(path))
    data, lost = reader.read(1_000_000)
    return {"metadata": json.loads(reader.info().metadata), "records": data, "lost": lost}


def traced(run_ranks: RunRanks, directory: pathlib.Path, world: int, *flags: str) -> list[dict[str, Any]]:
    """Train ranks with rings in a folder."""
    environment = {"MEGATRONAPP_SHM_DIR": str(directory), "MEGATRONAPP_SHM_PREFIX": "test"}
    return run_ranks(world, train, list(flags), environment=environment)


def records(result: dict[str, Any]) -> np.ndarray:
    """Return the records of a ring that lost none."""
    assert result["lost"] == 0
    return np.frombuffer(result["records"], RECORD)
