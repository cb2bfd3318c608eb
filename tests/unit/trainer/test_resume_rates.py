"""Rates of a resumed run: those of the flags, those of the checkpoint, or a refusal that names the flag."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import small_training

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --mock-data "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 20 --eval-iters 0 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --untie-embeddings-and-output-weights"
)
FIRST = "--lr 1e-3 --min-lr 1e-4 --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-7 --weight-decay 0.1"
SECOND = "--lr 1e-4 --min-lr 1e-6 --adam-beta1 0.7 --adam-beta2 0.95 --adam-eps 1e-5 --weight-decay 0.2"
OPTIMIZERS = [
    pytest.param("", id="plain", marks=pytest.mark.full("groups of both are built alike")),
    pytest.param("--use-distributed-optimizer", id="distributed"),
]


def resume_of_earlier_release(folder: str, first: str, second: str) -> Any:
    """Resume as `resume` does, from a checkpoint written before the groups of --decoupled-lr had a mark."""
    from megatron.core.optimizer import get_standard_config_overrides

    from megatronapp_trainer.checkpoint import resume_rates
    from megatronapp_trainer.training import optimizer as optim

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "_group_overrides", get_standard_config_overrides)
        patch.setattr(resume_rates, "state_of", lambda state: state.scheduler.state_dict())
        assert resume(folder, first, None) is None
    forget_new_arguments(pathlib.Path(folder))
    return resume(folder, None, second)


def forget_new_arguments(folder: pathlib.Path) -> None:
    """Leave the manifest as a release wrote it that did not keep these yet."""
    (path,) = folder.glob("iter_*/megatronapp.json")
    manifest = json.loads(path.read_text())
    for flag in ("--decoupled-lr", "--train-samples", "--rampup-batch-size"):
        del manifest["arguments"][flag]
    path.write_text(json.dumps(manifest))


def orders_of_lives(folder: str) -> list[int | None]:
    """Return the samples that the order of a ramp-up is drawn for, of a new run and of two that continue an earlier
    one."""
    found = []
    for life in range(3):
        run, manager = small_training.resumed(f"{MODEL} {FIRST} --rampup-batch-size 2 2 20 --save {folder}")
        found.append(run.state.order_samples)
        assert run.state.iteration == life
        small_training.trainer_of(run, checkpoints=manager).step()
        manager.save(run.state)
        if life == 0:
            forget_new_arguments(pathlib.Path(folder))
    return found


def resume(folder: str, first: str | None, second: str | None) -> Any:
    """Groups after a resume and the rates of two more steps; or why it was refused. None: no such run."""
    from megatronapp_trainer.errors import CheckpointError

    started = first is None
    for flags in (first, second):
        if flags is None:
            continue
        try:
            run, manager = small_training.resumed(f"{MODEL} {flags} --save {folder}")
        except CheckpointError as error:
            return str(error)
        assert (run.state.iteration > 0) == started
        trainer = small_training.trainer_of(run, checkpoints=manager)
        if not started:
            for _ in range(3):
                trainer.step()
            manager.save(run.state)
        started = True
    if second is None:
        return None
    found = [{name: value for name, value in group.items() if name != "params"} for group in groups_of(run)]
    rates = []
    for _ in range(2):
        rates.append([group["lr"] for group in groups_of(run)])
        trainer.step()
    return found, rates


def groups_of(run: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = run.state.optimizer.param_groups
    return groups


def cosine(step: int, largest: float, smallest: float, *, warmup: int = 2, decay: int = 20) -> float:
    """The rate of the step after `step` steps."""
    ratio = (step - warmup) / (decay - warmup)
    return smallest + (largest - smallest) * 0.5 * (math.cos(math.pi * ratio) + 1.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("choice", "values"),
    [
        pytest.param("--override-opt_param-scheduler", (1e-4, 1e-6, 0.7, 0.95, 1e-5, 0.2), id="flags"),
        pytest.param("--use-checkpoint-opt_param-scheduler", (1e-3, 1e-4, 0.8, 0.9, 1e-7, 0.1), id="checkpoint"),
    ],
)
def test_a_resumed_run_trains_with_the_rates_it_asks_for(
    run_ranks: RunRanks, tmp_path: pathlib.Path, optimizer: str, choice: str, values: tuple[float, ...]
) -> None:
    *rate, beta1, beta2, eps, weight_decay = values
    ((groups, rates),) = run_ranks(1, resume, str(tmp_path), f"{FIRST} {optimizer}", f"{SECOND} {optimizer} {choice}")
    for group in groups:
        assert (*group["betas"], group["eps"]) == (beta1, beta2, eps)
        assert [group["max_lr"], group["min_lr"]] == rate
        assert group["weight_decay"] == weight_decay * group["wd_mult"]
    assert {group["wd_mult"] for group in groups} == {0.0, 1.0}
    assert rates == [[pytest.approx(cosine(step, *rate))] * len(groups) for step in (3, 4)]


@pytest.mark.full("flags are compared alike", but=("lr-distributed", "adam-beta2-distributed"))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("--lr 2e-3", "--lr (spec.training.lr): 0.001 there, 0.002 here"),
        ("--min-lr 2e-4", "--min-lr (spec.training.minLr): 0.0001 there, 0.0002 here"),
        ("--adam-beta1 0.85", "--adam-beta1 (spec.training.adamBeta1): 0.8 there, 0.85 here"),
        ("--adam-beta2 0.99", "--adam-beta2 (spec.training.adamBeta2): 0.9 there, 0.99 here"),
        ("--adam-eps 1e-8", "--adam-eps (spec.training.adamEps): 1e-07 there, 1e-08 here"),
        ("--lr-warmup-init 1e-5", "--lr-warmup-init: 0.0 there, 1e-05 here"),
    ],
    ids=["lr", "min-lr", "adam-beta1", "adam-beta2", "adam-eps", "lr-warmup-init"],
)
def test_other_rates_without_a_choice_are_refused_by_name(
    run_ranks: RunRanks, tmp_path: pathlib.Path, optimizer: str, changed: str, named: str
) -> None:
    (reason,) = run_ranks(1, resume, str(tmp_path), f"{FIRST} {optimizer}", f"{FIRST} {optimizer} {changed}")
    assert f"differ from the checkpoint's in {named};" in reason


def test_a_rate_of_embeddings_cannot_be_added_to_loaded_optimizer_state(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    flags = FIRST, f"{FIRST} --decoupled-lr 5e-3 --override-opt_param-scheduler"
    (reason,) = run_ranks(1, resume, str(tmp_path), *flags)
    assert "differs from the checkpoint in --decoupled-lr (off there, on here)" in reason
    assert "--no-load-optim" in reason


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("second", "decoupled"),
    [
        ("--decoupled-lr 5e-3 --decoupled-min-lr 5e-4", (5e-3, 5e-4)),
        ("--decoupled-lr 2e-3 --override-opt_param-scheduler", (2e-3, 1e-4)),
        ("--decoupled-lr 2e-3 --use-checkpoint-opt_param-scheduler", (5e-3, 5e-4)),
    ],
)
def test_embeddings_keep_a_rate_of_their_own(
    run_ranks: RunRanks, tmp_path: pathlib.Path, optimizer: str, second: str, decoupled: tuple[float, float]
) -> None:
    first = f"{FIRST} {optimizer} --decoupled-lr 5e-3 --decoupled-min-lr 5e-4"
    ((groups, rates),) = run_ranks(1, resume, str(tmp_path), first, f"{FIRST} {optimizer} {second}")
    ends = [(group["max_lr"], group["min_lr"]) for group in groups]
    assert sorted(set(ends)) == [(1e-3, 1e-4), decoupled]
    assert rates[0] == [pytest.approx(cosine(3, *pair)) for pair in ends]


@pytest.mark.full("kinds of optimizers", but=("same-distributed", "checkpoint-distributed", "none-distributed"))
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, pytest.param("--bf16", id="bf16")])
@pytest.mark.parametrize(
    ("second", "decoupled"),
    [
        pytest.param("--decoupled-lr 5e-3 --decoupled-min-lr 5e-4", (5e-3, 5e-4), id="same"),
        pytest.param("--decoupled-lr 2e-3 --use-checkpoint-opt_param-scheduler", (5e-3, 5e-4), id="checkpoint"),
        pytest.param("", None, id="none"),
    ],
)
def test_embeddings_with_a_rate_of_their_own_of_an_earlier_release(
    run_ranks: RunRanks, tmp_path: pathlib.Path, optimizer: str, second: str, decoupled: tuple[float, float] | None
) -> None:
    first = f"{FIRST} {optimizer} --decoupled-lr 5e-3 --decoupled-min-lr 5e-4"
    (found,) = run_ranks(1, resume_of_earlier_release, str(tmp_path), first, f"{FIRST} {optimizer} {second}")
    if decoupled is None:
        assert "--decoupled-lr (on there, off here); give the checkpoint's values" in found
        return
    groups, rates = found
    ends = [(group["max_lr"], group["min_lr"]) for group in groups]
    assert sorted(set(ends)) == [(1e-3, 1e-4), decoupled]
    assert rates[0] == [pytest.approx(cosine(3, *pair)) for pair in ends]


def test_a_ramp_up_of_an_earlier_release_keeps_its_order(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    assert run_ranks(1, orders_of_lives, str(tmp_path)) == [[None, 80, 80]]
