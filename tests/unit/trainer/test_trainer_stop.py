"""An evaluation that a stop left follows the restart."""

import dataclasses
import os
import pathlib
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.torch

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 5 --lr 2e-3 --mock-data --vocab-size 120 --eval-iters 2 --eval-interval 2"
)


class Reporter:
    """Reporter that stores the results of evaluations."""

    def __init__(self) -> None:
        self.validations: list[tuple[int, float, str]] = []

    def validation(self, iteration: int, loss: float, split: str, **_details: object) -> None:
        self.validations.append((iteration, loss, split))

    def state(self, state: str) -> None:
        pass

    def step(self, metrics: Any, **_details: object) -> None:
        pass

    def checkpoints(self, report: Any) -> None:
        pass


def asking_to_stop(batches: Iterator[Any], before: int) -> Iterator[Any]:
    """The same batches, with a SIGTERM to this process before one of them."""
    for number, batch in enumerate(batches):
        if number == before:
            os.kill(os.getpid(), signal.SIGTERM)
        yield batch


def evaluations(flags: str, split: str, before: int) -> list[list[tuple[int, float, str]]]:
    """Evaluations of a run, of the same run with a signal before a batch of `split`, and of its restart."""
    warnings.simplefilter("ignore")
    from megatronapp_trainer.checkpoint.manager import CheckpointManager
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.device import prepare_device
    from megatronapp_trainer.parallel.groups import initialize_groups
    from megatronapp_trainer.training.build import build_iterators, build_run, build_schedule, layout_of
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    config = parse(f"{MODEL} {flags}".split())
    layout = layout_of(config)
    device = prepare_device(layout.local_rank)
    initialize_groups(config, layout, device)
    results = []
    for life in ("whole", "stopped", "restarted"):
        run = build_run(config, layout, device, vocab_size=120)
        manager = None if life == "whole" else CheckpointManager(config, layout)
        if manager is not None:
            manager.load(run.state)
        iterators = build_iterators(config, layout, run.state.consumed_samples)
        if life == "stopped":
            asking: dict[str, Any] = {split: asking_to_stop(getattr(iterators, split), before)}
            iterators = dataclasses.replace(iterators, **asking)
        reporter: Any = Reporter()
        with StopRequest() as stop_request:
            Trainer(
                run, iterators, build_schedule(run), stop_request=stop_request, reporter=reporter, checkpoints=manager
            ).train()
        results.append(reporter.validations)
    return results


@pytest.mark.parametrize(
    ("split", "before"),
    [pytest.param("train", 4 * 3, id="in the step before"), pytest.param("valid", 8 + 1, id="in the evaluation")],
)
def test_each_evaluation_is_there_once_with_the_same_loss(
    run_ranks: Callable[..., list[Any]], tmp_path: pathlib.Path, split: str, before: int
) -> None:
    ((whole, stopped, restarted),) = run_ranks(1, evaluations, f"--save {tmp_path / 'save'}", split, before)
    assert [step for step, _, _ in whole] == [2, 4]
    assert stopped == whole[:1]
    assert restarted == whole[1:]
