"""A run that was stopped and resumed trains as if it had never stopped, also in another layout."""

import importlib
import json
import pathlib
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from pytest_workers import FULL

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

STOP, END = (6, 10) if FULL else (3, 5)
"""Steps after which a run is saved, and at its end."""
BATCH = 8 if FULL else 4
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    f"--global-batch-size {BATCH} --lr 2e-3 --lr-decay-style cosine --lr-decay-iters 10 --lr-warmup-iters 2 "
    f"--mock-data --train-iters {END} --vocab-size 120 --eval-iters 0"
)
STEADY = "--attention-dropout 0 --hidden-dropout 0"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
VPP = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
DPP = f"{VPP} --use-dpp --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DISTRIBUTED = "--use-distributed-optimizer"
TOLERANCE = 1e-5


def train(flags: str) -> list[float] | None:
    """Losses of a run, on the reporting rank; it resumes if there is something to resume from."""
    run, manager = small_training.resumed(f"{MODEL} {flags}")
    recorder = small_training.train(run, checkpoints=manager)
    return None if recorder is None else recorder.losses


def losses_of(run_ranks: RunRanks, world: int, flags: str) -> list[float]:
    results = run_ranks(world, train, flags)
    (losses,) = [result for result in results if result is not None]
    return list(losses)


def stop_and_resume(
    run_ranks: RunRanks, save: pathlib.Path, first: tuple[int, str], second: tuple[int, str]
) -> tuple[list[float], list[float]]:
    """Losses of the steps after the stop: in one layout without it, and resumed in another."""
    whole = losses_of(run_ranks, first[0], f"{first[1]} --save {save} --save-interval {STOP}")
    assert len(whole) == END
    shutil.rmtree(save / f"iter_{END:07d}")  # as if the run had ended before
    (save / "latest_checkpointed_iteration.txt").write_text(str(STOP))
    return whole[STOP:], losses_of(run_ranks, second[0], f"{second[1]} --save {save}")


@pytest.mark.full("a sweep of layouts", but=("TP2-distributed",))
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        pytest.param(1, "", id="alone"),
        pytest.param(1, "--bf16", id="bf16"),
        pytest.param(1, f"--bf16 {DISTRIBUTED}", id="bf16-distributed"),
        pytest.param(2, f"{TP2} {DISTRIBUTED}", id="TP2-distributed"),
        pytest.param(2, VPP, id="VPP"),
        pytest.param(2, DPP, id="dpp-recomputed"),
        pytest.param(2, DISTRIBUTED, id="DP2-distributed"),
        pytest.param(4, f"{TP2} {PP2}", id="TP2xPP2"),
    ],
)
def test_resume_is_bit_equal(run_ranks: RunRanks, tmp_path: pathlib.Path, world: int, flags: str) -> None:
    """Train with dropout, so that random states matter, too."""
    whole, resumed = stop_and_resume(run_ranks, tmp_path / "save", (world, flags), (world, flags))
    assert len(resumed) == END - STOP
    assert resumed == whole


@pytest.mark.full("a sweep of layouts", but=("distributed-TP2xPP2-to-one",))
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((4, f"{TP2} {PP2}"), (1, ""), id="TP2xPP2-to-one"),
        pytest.param((2, ""), (4, f"{TP2} {PP2}"), id="DP2-to-TP2xPP2"),
        pytest.param((2, VPP), (2, ""), id="VPP-to-DP2"),
        pytest.param((2, f"{PP2} --decoder-first-pipeline-num-layers 3"), (1, ""), id="uneven-to-one"),
        pytest.param((2, PP2), (2, f"{PP2} --decoder-last-pipeline-num-layers 1"), id="PP2-to-uneven"),
    ],
)
@pytest.mark.parametrize("optimizer", [pytest.param("", id="plain"), pytest.param(DISTRIBUTED, id="distributed")])
def test_resume_in_another_layout(
    run_ranks: RunRanks, tmp_path: pathlib.Path, first: tuple[int, str], second: tuple[int, str], optimizer: str
) -> None:
    worlds = [(world, f"{flags} {STEADY} {optimizer}") for world, flags in (first, second)]
    whole, resumed = stop_and_resume(run_ranks, tmp_path / "save", worlds[0], worlds[1])
    assert resumed == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.full("resumed runs are bit-equal above")
def test_a_third_life_resumes_what_the_second_saved(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    """Check that state that belongs to other stages does not remain in the optimizer."""
    save = f"--save {tmp_path / 'save'}"
    whole = losses_of(run_ranks, 1, STEADY)
    lives = [
        losses_of(run_ranks, 1, f"{STEADY} {save} --exit-interval {STOP // 2}"),
        losses_of(run_ranks, 2, f"{STEADY} {save} {PP2} --exit-interval {STOP}"),
        losses_of(run_ranks, 1, f"{STEADY} {save}"),
    ]
    assert [len(life) for life in lives] == [STOP // 2, STOP - STOP // 2, END - STOP]
    assert [loss for life in lives for loss in life] == pytest.approx(whole, rel=TOLERANCE)


def test_what_lies_in_the_directory(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    save = tmp_path / "save"
    losses_of(run_ranks, 2, f"--train-iters 6 --save {save} --save-interval 2 --keep-last 2")
    assert sorted(entry.name for entry in save.iterdir()) == [
        "iter_0000004",
        "iter_0000006",
        "latest_checkpointed_iteration.txt",
        "owner.json",
    ]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "6"
    manifest = json.loads((save / "iter_0000006" / "megatronapp.json").read_text())
    assert manifest["consumed_samples"] == 6 * BATCH
    assert manifest["attempt"] == 0


def learn_on(folder: str) -> list[str]:
    """Return text_tokens.json of a model, of it fine-tuned, and of a continuation of that."""
    from megatronapp_trainer.parallel.groups import destroy_groups

    first, second = pathlib.Path(folder) / "first", pathlib.Path(folder) / "second"
    found: list[str] = []
    for flags in (f"--save {first}", f"--load {first} --finetune --save {second}", f"--save {second} --no-load-optim"):
        run, manager = small_training.resumed(f"{MODEL} {flags}")
        run.state.iteration += 1
        manager.save(run.state)
        path = pathlib.Path(run.config.checkpoint.save) / f"iter_{run.state.iteration:07d}" / "text_tokens.json"
        if "--load" not in flags and not found:
            path.write_text('{"before": [1], "after": [], "ends": [0, 7]}')
        found.append(path.read_text() if path.is_file() else "")
    destroy_groups()
    return found


def test_a_model_that_learns_on_keeps_what_it_expects_around_a_text(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    (found,) = run_ranks(1, learn_on, str(tmp_path))
    assert found == ['{"before": [1], "after": [], "ends": [0, 7]}'] * 3


def pretrain_and_count(flags: str, folder: str) -> tuple[list[float], int]:
    """All weights after `pretrain`, and how many chunks were given initial ones. Fresh memory holds NaN."""
    warnings.simplefilter("ignore")
    import torch

    from megatronapp_trainer import pretrain
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.training import loop

    gpt: Any = importlib.import_module("megatronapp_trainer.models.gpt")
    drawn, weights = 0, list[float]()
    initialize, train_to_the_end = gpt.initialize_weights, loop.Trainer.train

    def counted(model: Any, *arguments: Any, **keywords: Any) -> None:
        nonlocal drawn
        drawn += 1
        initialize(model, *arguments, **keywords)

    def poisoned(weight: torch.Tensor) -> torch.Tensor:
        weight.data.fill_(torch.nan)
        return weight

    def noted(trainer: Any) -> Any:
        weights.extend(float(weight.double().sum()) for weight in trainer._state.chunks[0].parameters())
        return train_to_the_end(trainer)

    core_config: Any = importlib.import_module("megatronapp_trainer.models.core_config")
    gpt.initialize_weights, core_config.leave_empty = counted, poisoned
    loop.Trainer.train = noted  # type: ignore[method-assign,assignment]
    pretrain.pretrain(parse(f"{MODEL} {flags} --save {folder}".split()))
    return weights, drawn


@pytest.mark.full("two kinds of weights", but=("bf16-distributed",))
@pytest.mark.parametrize(
    "flags", [pytest.param("", id="plain"), pytest.param("--bf16 --use-distributed-optimizer", id="bf16-distributed")]
)
def test_weights_are_not_drawn_where_a_checkpoint_is_loaded(
    run_ranks: RunRanks, tmp_path: pathlib.Path, flags: str
) -> None:
    def start(more: str) -> Any:
        (result,) = run_ranks(1, pretrain_and_count, f"{flags} {more}", str(tmp_path / "save"))
        return result

    (_, drawn_at_first), (weights, drawn_again) = start("--exit-interval 2"), start("--exit-interval 3")
    assert (drawn_at_first, drawn_again) == (1, 0)
    assert weights == [pytest.approx(weight) for weight in weights]  # no NaN is left
