"""BERT resumes from its checkpoints to the last bit, in another layout within the tolerance, and as no other model."""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from pytest_workers import FULL

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

STOP, END = 2, 4
BATCH = 8 if FULL else 4
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --micro-batch-size 2 "
    f"--global-batch-size {BATCH} --lr 2e-3 --lr-decay-style cosine --lr-decay-iters 10 --mock-data --vocab-size 61 "
    f"--make-vocab-size-divisible-by 4 --train-iters {END} --eval-iters 0"
)
BERT = f"--model-type bert {MODEL}"
STEADY = "--attention-dropout 0 --hidden-dropout 0"
PP2 = "--pipeline-model-parallel-size 2"
TOLERANCE = 1e-5


def train(flags: str) -> list[float] | None:
    """Losses of a run, on the reporting rank; it resumes if there is something to resume from."""
    run, manager = small_training.resumed(flags)
    recorder = small_training.train(run, checkpoints=manager)
    return None if recorder is None else recorder.losses


def losses_of(run_ranks: RunRanks, world: int, flags: str) -> list[float]:
    (losses,) = [result for result in run_ranks(world, train, flags) if result is not None]
    return list(losses)


def rewind(save: pathlib.Path) -> None:
    """Leave the folder as if the run had ended before its last steps."""
    shutil.rmtree(save / f"iter_{END:07d}")
    (save / "latest_checkpointed_iteration.txt").write_text(str(STOP))


def test_resume_with_dropout_is_bit_equal(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    flags = f"{BERT} --tensor-model-parallel-size 2 --use-distributed-optimizer --save {tmp_path}/save"
    whole = losses_of(run_ranks, 2, f"{flags} --save-interval {STOP}")
    rewind(tmp_path / "save")
    assert losses_of(run_ranks, 2, flags) == whole[STOP:]


def test_resume_in_another_layout(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    flags = f"{BERT} {STEADY} --save {tmp_path}/save"
    whole = losses_of(run_ranks, 4, f"{flags} {PP2} --tensor-model-parallel-size 2 --save-interval {STOP}")
    rewind(tmp_path / "save")
    assert losses_of(run_ranks, 1, flags) == pytest.approx(whole[STOP:], rel=TOLERANCE)


def refusal(flags: str) -> str:
    """Return why a run does not resume."""
    from megatronapp_trainer.errors import TrainerError

    try:
        small_training.resumed(flags)
    except TrainerError as error:
        return str(error)
    return ""


def test_another_model_does_not_resume(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    flags = f"{BERT} {STEADY} --save {tmp_path}/save --train-iters 1"
    losses_of(run_ranks, 1, flags)
    (reason,) = run_ranks(1, refusal, f"{MODEL} {STEADY} --save {tmp_path}/save")
    assert "this run differs from the checkpoint in --model-type (bert there, gpt here)" in reason
    (reason,) = run_ranks(1, refusal, f"{flags} --bert-no-binary-head")
    assert "--bert-no-binary-head (off there, on here)" in reason


def test_checkpoints_are_not_converted(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.checkpoint.convert.job import convert
    from megatronapp_trainer.checkpoint.convert.options import HF, OURS, ConversionOptions
    from megatronapp_trainer.errors import CheckpointError

    losses_of(run_ranks, 1, f"{BERT} --save {tmp_path}/save --train-iters 1")
    for target in (HF, OURS):
        with pytest.raises(CheckpointError, match="iter_0000001 is a BERT checkpoint; only GPT is converted"):
            convert(ConversionOptions(load_dir=tmp_path / "save", save_dir=tmp_path / "to", to=target))
    assert [entry.name for entry in tmp_path.iterdir()] == ["save"]


def evaluated(flags: str) -> list[Any]:
    """Losses of a run with its evaluations, by step and split."""
    run = small_training.prepare(flags)
    found: list[Any] = []

    class EvaluationReporter:
        def step(self, metrics: Any, **_details: object) -> None:
            found.append((metrics.iteration, dict(metrics.losses), metrics.loss))

        def state(self, state: str) -> None: ...

        def validation(self, iteration: int, loss: float, split: str, *, by_name: dict[str, float]) -> None:
            found.append((iteration, split, dict(by_name), loss))

    trainer = small_training.trainer_of(run, reporter=EvaluationReporter() if run.layout.is_reporter else None)
    trainer.train()
    trainer.test()
    from megatronapp_trainer.parallel.groups import destroy_groups

    destroy_groups()
    return found


def test_both_losses_are_reported_and_evaluations_change_no_step(run_ranks: RunRanks) -> None:
    flags = f"{BERT} {STEADY}"
    plain = run_ranks(2, evaluated, f"{flags} {PP2}")
    found = run_ranks(2, evaluated, f"{flags} {PP2} --eval-iters 1 --eval-interval 2")
    (plain_events,) = [events for events in plain if events]
    (events,) = [events for events in found if events]
    assert [event for event in events if len(event) == 3] == plain_events
    evaluations = [event for event in events if len(event) == 4]
    assert [event[:2] for event in evaluations] == [(2, "validation"), (4, "validation"), (4, "test")]
    for event in events:
        by_name, loss = event[-2], event[-1]
        assert list(by_name) == ["lm loss", "sop loss"]
        assert sum(by_name.values()) == pytest.approx(loss, rel=1e-12)
    assert evaluations[0][2] != evaluations[1][2]


def test_without_sentence_order_there_is_a_single_loss(run_ranks: RunRanks) -> None:
    (events,) = run_ranks(1, evaluated, f"{BERT} {STEADY} --bert-no-binary-head")
    assert [list(by_name) for _, by_name, _ in events] == [["lm loss"]] * END
