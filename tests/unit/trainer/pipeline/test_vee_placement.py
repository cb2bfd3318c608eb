"""Training and evaluations with stages in a vee (ZB-V) are equal to those of other placements of the same layers."""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from recording_reporter import RecordingReporter

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

STEPS, SAVED = 4, 2
MODEL = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    f"--global-batch-size 8 --train-iters {STEPS} --lr 2e-3 --lr-decay-style cosine --lr-decay-iters {STEPS} "
    "--lr-warmup-iters 2 --mock-data --vocab-size 120 --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 "
    "--eval-interval 2"
)
PP2, PP4 = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
LOOP = "--num-virtual-stages-per-pipeline-rank 2"
VEE = f"{LOOP} --use-dpp --dpp-schedule zero-bubble"
GUIDED = f"{LOOP} --use-dpp --dpp-placement vee"
UNTIED = "--untie-embeddings-and-output-weights"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
LAYOUTS = {
    "PP2": (2, PP2),
    "PP2-untied-recomputed": (
        2,
        f"{PP2} {UNTIED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "PP2-bf16": (2, f"{PP2} --bf16"),
    "PP2-per-token": (2, f"{PP2} --calculate-per-token-loss"),
    "PP2-ends-counted": (
        2,
        f"{PP2} --num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ),
    "PP4": (4, PP4),
    "PP4-untied": (4, f"{PP4} {UNTIED}"),
    "TP2xPP2+SP": (4, f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel"),
    "DP2xPP2": (4, f"{PP2} {SHARDED}"),
    "DP2xPP2-untied-bf16": (4, f"{PP2} {SHARDED} {UNTIED} --bf16"),
}
QUICK = ("PP2",)
TOLERANCE = 1e-5


@dataclasses.dataclass
class Recorder(RecordingReporter):
    """Stores the losses of evaluations, too."""

    evaluations: list[tuple[int, str, float]] = dataclasses.field(default_factory=list)

    def validation(self, iteration: int, loss: float, split: str, **_details: object) -> None:
        self.evaluations.append((iteration, split, loss))


Record = tuple[list[float], list[float], list[tuple[int, str, float]]]


def train(flags: str) -> Record | None:
    """Losses, gradient norms and evaluations of a run on the reporting rank; it resumes what there is."""
    run, manager = small_training.resumed(f"{MODEL} {flags}")
    recorder = Recorder() if run.layout.is_reporter else None
    checkpoints = manager if "--save" in flags else None
    small_training.trainer_of(run, checkpoints=checkpoints, reporter=recorder).train()
    return None if recorder is None else (recorder.losses, recorder.grad_norms, recorder.evaluations)


def record_of(run_ranks: RunRanks, world: int, flags: str) -> Record:
    (record,) = [record for record in run_ranks(world, train, flags) if record is not None]
    losses, norms, evaluations = record
    return losses, norms, evaluations


@pytest.mark.full("a sweep of layouts", but=QUICK)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_vee_is_equal_to_a_loop(run_ranks: RunRanks, layout: str) -> None:
    """Check losses and evaluations to the last bit.

    Norms of gradients are sums over the ranks' own squares, whose order is another one, so that nothing is clipped.
    """
    world, flags = LAYOUTS[layout]
    losses, norms, evaluations = record_of(run_ranks, world, f"{flags} {VEE} --clip-grad 0")
    expected_losses, expected_norms, expected_evaluations = record_of(run_ranks, world, f"{flags} {LOOP} --clip-grad 0")
    assert len(losses) == STEPS
    assert losses == expected_losses
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE)
    assert [step for step, *_ in evaluations] == [2, 4]
    assert evaluations == expected_evaluations


@pytest.mark.full("a sweep of layouts")
@pytest.mark.parametrize(
    ("layout", "vee"),
    [
        *((layout, VEE) for layout, (_, flags) in LAYOUTS.items() if "bf16" not in flags),
        *((layout, GUIDED) for layout in ("PP2-ends-counted", "PP4", "TP2xPP2+SP", "DP2xPP2")),
    ],
)
def test_a_vee_agrees_with_a_single_process(run_ranks: RunRanks, layout: str, vee: str) -> None:
    world, flags = LAYOUTS[layout]
    common = [flag for flag in (UNTIED, "--calculate-per-token-loss") if flag in flags]
    model = f"{'--num-layers 6' if 'num-layers 6' in flags else ''} {' '.join(common)} --clip-grad 0.5"
    losses, norms, evaluations = record_of(run_ranks, world, f"{flags} {vee} --clip-grad 0.5")
    expected_losses, expected_norms, expected_evaluations = record_of(run_ranks, 1, model)
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE)
    assert [loss for *_, loss in evaluations] == pytest.approx(
        [loss for *_, loss in expected_evaluations], rel=TOLERANCE
    )


@pytest.mark.full("runs that are saved and resumed")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((2, f"{PP2} {VEE}"), (2, PP2), id="vee-to-1F1B"),
        pytest.param((2, PP2), (2, f"{PP2} {VEE}"), id="1F1B-to-vee"),
        pytest.param((4, f"{PP4} {VEE}"), (2, f"{PP2} {LOOP}"), id="vee-to-loop"),
        pytest.param((2, f"{PP2} {LOOP}"), (2, f"{PP2} {VEE}"), id="loop-to-vee"),
        pytest.param((4, f"{PP4} {GUIDED}"), (2, f"{PP2} {VEE}"), id="guided-vee-to-vee"),
        pytest.param((2, f"{PP2} {LOOP}"), (2, f"{PP2} {GUIDED}"), id="loop-to-guided-vee"),
        pytest.param((4, f"{PP2} {VEE} {SHARDED}"), (1, "--use-distributed-optimizer"), id="sharded-vee-to-one"),
        pytest.param((1, "--use-distributed-optimizer"), (4, f"{PP2} {VEE} {SHARDED}"), id="one-to-sharded-vee"),
        pytest.param((2, f"{PP2} {VEE} {UNTIED}"), (1, UNTIED), id="untied-vee-to-one"),
        pytest.param((2, f"{PP2} {VEE} --hidden-dropout 0.1"), (2, f"{PP2} {VEE} --hidden-dropout 0.1"), id="dropout"),
    ],
)
def test_resume_into_and_from_a_vee(
    run_ranks: RunRanks, tmp_path: pathlib.Path, first: tuple[int, str], second: tuple[int, str]
) -> None:
    save = tmp_path / "save"
    whole, _, _ = record_of(run_ranks, first[0], f"{first[1]} --save {save} --save-interval {SAVED}")
    shutil.rmtree(save / f"iter_{STEPS:07d}")  # as if the run had ended before
    (save / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed, _, _ = record_of(run_ranks, second[0], f"{second[1]} --save {save}")
    assert len(resumed) == STEPS - SAVED
    if first == second:
        assert resumed == whole[SAVED:]
    assert resumed == pytest.approx(whole[SAVED:], rel=TOLERANCE)


def stored_tensors(folder: pathlib.Path) -> dict[str, bytes]:
    """Contents of all tensors of a checkpoint by name."""
    import torch

    from megatronapp_trainer.checkpoint.tensor_files import StoredTensors

    stored = StoredTensors(folder)
    names = [name for name in stored.names() if stored.find(name) is not None]
    return {name: stored.read(name).contiguous().view(torch.uint8).numpy().tobytes() for name in names}


@pytest.mark.full("two checkpoints for each layout")
@pytest.mark.parametrize("flags", ["", UNTIED, "--use-distributed-optimizer"])
@pytest.mark.parametrize("schedule", ["auto", "zero-bubble"])
def test_checkpoints_are_the_same_with_and_without(
    run_ranks: RunRanks, tmp_path: pathlib.Path, flags: str, schedule: str
) -> None:
    runs = {"without": "", "with": f"--use-dpp --dpp-schedule {schedule}"}
    contents = []
    for name, more in runs.items():
        save = tmp_path / name
        record_of(run_ranks, 2, f"{PP2} {LOOP} {flags} {more} --clip-grad 0 --save {save} --eval-iters 0")
        contents.append(stored_tensors(save / f"iter_{STEPS:07d}"))
    without, with_dpp = contents
    assert any("exp_avg" in name for name in without)
    assert without.keys() == with_dpp.keys()
    assert [name for name, content in without.items() if with_dpp[name] != content] == []
