"""Training with forward and backward on separate ranks: bit-equal to plain training."""

import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
from evaluated_training import Record, train, train_recorded

from megatronapp_common.names import ExitCode

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

SWITCH = "--forward-backward-disaggregating"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
STEPS_TO_CHOICE = 9
"""One step to warm up and two that are measured for each of three modes."""
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 2000"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
STILL = "--attention-dropout 0 --hidden-dropout 0"
ON_CPU = f"{STILL} --fbd-ship full --fbd-forward-on-cpu"
CASES = {
    "pair": (1, ""),
    "pair-recomputed": (1, f"{FULL_RECOMPUTE} --calculate-per-token-loss --clip-grad 0.5"),
    "PP2": (2, f"{PP2} --fbd-ship full"),
    "VPP2-untied": (2, f"{VPP2} --untie-embeddings-and-output-weights --fbd-ship selective"),
    "VPP2-full": (2, f"{VPP2} --fbd-ship full"),
    "TP2": (2, f"{TP2} --fbd-ship full --num-layers 2"),
    "TP2-saved": (2, f"{TP2} {FULL_RECOMPUTE} --fbd-ship saved"),
    "one-forward-for-two": (2, f"{SHARDED} --fbd-backward-per-forward 2 --fbd-ship full"),
    "one-forward-for-two-selective": (2, f"{SHARDED} --fbd-backward-per-forward 2 --fbd-ship selective"),
    "DP2-bf16": (2, f"{SHARDED} --bf16"),
    "PP2-fp16": (2, f"{PP2} --fp16 --initial-loss-scale 4096"),
    "PP2-selective": (2, f"{PP2} --recompute-granularity selective --bf16"),
    "TP2xPP2": (4, f"{TP2} {PP2} --fbd-ship selective"),
    "one-forward-for-two-PP2": (4, f"{PP2} {SHARDED} --fbd-backward-per-forward 2"),
    "ramp-up": (1, "--rampup-batch-size 4 4 8"),
    "forward-on-CPU": (1, f"--bf16 --normalization RMSNorm --disable-bias-linear {ON_CPU}"),
    "forward-on-CPU-VPP2": (2, f"{VPP2} --untie-embeddings-and-output-weights {ON_CPU}"),
    "forward-on-CPU-TP2": (2, f"{TP2} {FULL_RECOMPUTE} {STILL} --fbd-forward-on-cpu"),
    "forward-on-CPU-one-for-two": (2, f"{SHARDED} --bf16 --fbd-backward-per-forward 2 {ON_CPU}"),
}
"""Ranks of plain training, and flags; dropout is 0.1 unless they say otherwise.

All ranks run on the CPU: with forward ranks there alone the passes of both roles are the same, but not their devices.
"""


def record_of(run_ranks: RunRanks, world: int, flags: str) -> Record:
    results = run_ranks(world, train, flags, environment={"MEGATRONAPP_JOB_UID": f"fbd-{os.getpid()}-{world}"})
    assert [code for code, _ in results] == [ExitCode.OK] * world
    (record,) = [record for _, record in results if record is not None]
    return tuple(record)


def without_fbd(flags: str) -> str:
    return re.sub(r"--fbd-forward-on-cpu|--fbd-\S+ \S+", "", flags)


def ranks_with_roles(world: int, flags: str) -> int:
    return world + (world // 2 if "per-forward" in flags else world)


@pytest.mark.full("a sweep of layouts", but=("TP2", "forward-on-CPU"))
@pytest.mark.parametrize(("world", "flags"), CASES.values(), ids=list(CASES))
def test_training_is_bit_equal_to_plain_training(run_ranks: RunRanks, world: int, flags: str) -> None:
    plain = record_of(run_ranks, world, without_fbd(flags))
    assert len(plain[0]) == 3
    assert len(plain[2]) == 3, "two while training, and one of each split after it"
    assert record_of(run_ranks, ranks_with_roles(world, flags), f"{flags} {SWITCH}") == plain


BY_POLICY = {
    "VPP2-auto": (2, f"{VPP2} --use-dpp"),
    "VPP2-full-dfc": (2, f"{VPP2} --use-dpp --dpp-schedule dfc --fbd-ship full"),
    "VPP2-bfc": (2, f"{VPP2} --use-dpp --dpp-schedule bfc --bf16"),
    "VPP2-static": (2, f"{VPP2} --use-dpp --dpp-schedule static"),
    "one-forward-for-two-VPP2-auto": (
        4,
        f"{VPP2} {SHARDED} --use-dpp --fbd-backward-per-forward 2 --fbd-ship selective",
    ),
    "PP2-recomputed-auto": (2, f"{PP2} {FULL_RECOMPUTE} --use-dpp --calculate-per-token-loss --clip-grad 0.5"),
    "VPP2-forward-on-CPU-auto": (2, f"{VPP2} --use-dpp {ON_CPU}"),
    "VPP2-ramp-up-bfc": (2, f"{VPP2} --use-dpp --dpp-schedule bfc --rampup-batch-size 4 4 8"),
}


def train_with_late_messages(flags: str) -> tuple[int, Record | None, int]:
    """Train with messages that a rank finds late; returns the passes that ran before their turn as well."""
    import late_messages

    from megatronapp_trainer.fbd.choice import BackwardChoice, ForwardChoice

    late_messages.install()
    early = 0
    forward, backward = ForwardChoice.choose, BackwardChoice.choose

    def counting_forward(choice: Any) -> Any:
        nonlocal early
        chosen = forward(choice)
        early += chosen is not None and chosen.early
        return chosen

    def counting_backward(choice: Any) -> Any:
        nonlocal early
        task = backward(choice)
        early += task is not None and choice.early
        return task

    setattr(ForwardChoice, "choose", counting_forward)  # noqa: B010 - a method of one process's class
    setattr(BackwardChoice, "choose", counting_backward)  # noqa: B010
    return *train(flags), early


@pytest.mark.full("a sweep of policies", but=("VPP2-auto",))
@pytest.mark.parametrize(("world", "flags"), BY_POLICY.values(), ids=list(BY_POLICY))
def test_each_role_follows_the_policy_of_the_schedule(run_ranks: RunRanks, world: int, flags: str) -> None:
    """Bit-equal to MegaDPP, whose dropout masks do not depend on the order of passes, with late messages too."""
    plain = record_of(run_ranks, world, without_fbd(flags))
    environment = {"MEGATRONAPP_JOB_UID": f"fbd-{os.getpid()}-{world}"}
    ranks = ranks_with_roles(world, flags)
    results = run_ranks(ranks, train_with_late_messages, f"{flags} {SWITCH}", environment=environment)
    assert [code for code, *_ in results] == [ExitCode.OK] * ranks
    assert [tuple(record) for _, record, _ in results if record is not None] == [plain]
    early = sum(early for *_, early in results)
    assert (early > 0) == ("virtual" in flags and "dpp-schedule" not in flags), "passes of several chunks change places"


MEASURING = f"--train-iters {STEPS_TO_CHOICE + 4} --eval-iters 0"
AUTO = {
    "one-forward-for-two": (2, f"{MEASURING} {SHARDED} --fbd-backward-per-forward 2", 0),
    "VPP2-recomputed": (2, f"{MEASURING} {VPP2} {FULL_RECOMPUTE} --bf16", 0),
    "ramp-up": (1, f"{MEASURING} --rampup-batch-size 4 4 8", 2),  # 8 samples are two steps of 4
}


def train_reporting(flags: str) -> tuple[list[float], list[float], list[dict[str, Any]]]:
    """Losses, gradient norms and published reports; empty on ranks that do not report."""
    code, recorder = train_recorded(flags)
    assert code == ExitCode.OK
    return recorder.losses, recorder.grad_norms, recorder.reports


def reported(run_ranks: RunRanks, world: int, flags: str) -> tuple[list[float], list[float], list[dict[str, Any]]]:
    environment = {"MEGATRONAPP_JOB_UID": f"fbd-{os.getpid()}-{world}"}
    (found,) = [found for found in run_ranks(world, train_reporting, flags, environment=environment) if found[0]]
    losses, norms, reports = found
    return losses, norms, [report for report in reports if isinstance(report, dict)]  # those of checkpoints are none


@pytest.mark.full("steps to measure three modes; each mode trains above")
@pytest.mark.parametrize(("world", "flags", "ramp"), AUTO.values(), ids=list(AUTO))
def test_the_fastest_mode_is_chosen_and_results_are_those_of_any(
    run_ranks: RunRanks, world: int, flags: str, ramp: int
) -> None:
    """Steps are bit-equal while modes are measured in turns, and after the choice."""

    plain = reported(run_ranks, world, without_fbd(flags))
    losses, norms, reports = reported(run_ranks, ranks_with_roles(world, flags), f"{flags} {SWITCH} --fbd-ship auto")
    assert (losses, norms) == plain[:2]
    *measuring, chosen = reports
    steps = [(report["fromStep"], report["ship"]) for report in measuring]
    assert steps == [(0, "saved"), (ramp + 3, "selective"), (ramp + 6, "full")]
    assert not any(report["chosen"] for report in measuring)
    seconds = {mode["ship"]: mode["stepSeconds"] for mode in chosen["modes"]}
    sizes = [mode["shipBytes"] for mode in chosen["modes"]]
    assert chosen["chosen"] and chosen["fromStep"] == ramp + STEPS_TO_CHOICE
    assert seconds[chosen["ship"]] == min(seconds.values()) > 0
    assert min(sizes) > 0 and sizes[0] > sizes[2]
    assert min(chosen["forwardSeconds"], chosen["backwardSeconds"], chosen["shipSeconds"]) > 0
    assert chosen["backwardPerForward"] == (2 if "per-forward" in flags else 1)
    assert chosen["advice"]


@pytest.mark.full("two runs of many steps")
def test_a_resumed_run_measures_again(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    flags = f"{MEASURING} --train-iters 17 --lr-decay-iters 17"
    saved = f"{flags} --save {tmp_path} --load {tmp_path} --save-interval 5"
    plain = reported(run_ranks, 1, flags)
    first = reported(run_ranks, 2, f"{saved} --exit-interval 5 {SWITCH} --fbd-ship auto")
    second = reported(run_ranks, 2, f"{saved} {SWITCH} --fbd-ship auto")
    assert first[0] + second[0] == plain[0]
    assert first[1] + second[1] == plain[1]
    assert [report["ship"] for report in first[2]] == ["saved", "selective"]
    assert [report["ship"] for report in second[2][:-1]] == ["saved", "selective", "full"]
    assert second[2][-1]["chosen"]


MERGED = "--ignore-forward-tensor-parallel"
CLOSE = {
    "TP2": (2, f"{TP2} --attention-dropout 0 --hidden-dropout 0"),
    "TP2-dropout": (2, "--tensor-model-parallel-size 2 --attention-dropout 0 --fbd-ship full --num-layers 2"),
    "TP2xPP2-recomputed": (
        4,
        f"{TP2} {PP2} {FULL_RECOMPUTE} --attention-dropout 0 --hidden-dropout 0 --swiglu --disable-bias-linear",
    ),
    "TP2xDP2-sharded": (
        4,
        f"--tensor-model-parallel-size 2 {SHARDED} --attention-dropout 0 --hidden-dropout 0 --swiglu "
        "--disable-bias-linear --group-query-attention --num-query-groups 2 --fbd-ship selective",
    ),
    "TP2-forward-on-CPU": (2, f"{TP2} {ON_CPU}"),
}


@pytest.mark.full("a sweep of layouts", but=("TP2-dropout",))
@pytest.mark.parametrize(("world", "flags"), CLOSE.values(), ids=list(CLOSE))
def test_a_merged_forward_rank_trains_alike(run_ranks: RunRanks, world: int, flags: str) -> None:
    plain = record_of(run_ranks, world, without_fbd(flags))
    merged = record_of(run_ranks, world + world // 2, f"{flags} {SWITCH} {MERGED}")
    for expected, found in zip(plain, merged, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_checkpoints_are_those_of_plain_training_and_resume_both_ways(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    def saved(folder: str, steps: int) -> str:
        return f"--save {tmp_path / folder} --load {tmp_path / folder} --save-interval 2 --exit-interval {steps}"

    whole = record_of(run_ranks, 1, "")
    record_of(run_ranks, 1, saved("plain", 2))
    record_of(run_ranks, 2, f"{saved('fbd', 2)} {SWITCH}")
    plain_then_fbd = record_of(run_ranks, 2, f"{saved('plain', 100)} {SWITCH}")
    fbd_then_plain = record_of(run_ranks, 1, saved("fbd", 100))
    assert plain_then_fbd[0] == fbd_then_plain[0] == whole[0][2:]
    assert plain_then_fbd[1] == fbd_then_plain[1] == whole[1][2:]
