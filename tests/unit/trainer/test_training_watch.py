"""Checks of equal weights of replicas, alerts of spikes, profiles, and memory in the log."""

import json
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import small_training
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.errors import TrainerError, UsageError

RunRanks = Callable[..., list[Any]]

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --mock-data "
    "--vocab-size 64 --train-iters 4 --lr 1e-3 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
)
CHECKED = "--check-weight-hash-across-dp-replicas-interval 2"


def trained_with_flipped_bit(flags: str, rank: int | None) -> tuple[list[float], str]:
    """Train; on a rank the lowest bit of a single weight is flipped after the first step. Losses, and the error."""
    import torch

    run = small_training.prepare(flags)
    trainer = small_training.trainer_of(run)
    losses = [trainer.step().loss.mean]
    if rank is not None and run.layout.rank == rank:
        weight = dict(run.state.chunks[0].named_parameters())["module.decoder.layers.1.mlp.linear_fc2.weight"]
        weight.data.view(torch.int32)[3, 5] ^= 1
    try:
        trainer.train()
    except TrainerError as error:
        return losses, str(error)
    return losses, ""


@pytest.mark.torch
@pytest.mark.full("two ways to reduce gradients", but=("plain",))
@pytest.mark.parametrize(
    "more",
    [
        pytest.param("", id="plain"),
        pytest.param("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", id="overlap"),
    ],
)
def test_equal_replicas_pass(run_ranks: RunRanks, more: str) -> None:
    found = run_ranks(2, trained_with_flipped_bit, f"{FLAGS} {CHECKED} {more}", None)
    assert [text for _, text in found] == ["", ""]


@pytest.mark.torch
def test_a_flipped_bit_of_a_replica_is_found(run_ranks: RunRanks) -> None:
    for _, text in run_ranks(2, trained_with_flipped_bit, f"{FLAGS} {CHECKED}", 1):
        assert "after step 2 replicas have different weights: " in text
        assert "decoder.layers.1.mlp.linear_fc2.weight" in text


@pytest.mark.torch
def test_other_tensor_ranks_are_no_replicas(run_ranks: RunRanks) -> None:
    flags = f"{FLAGS} {CHECKED} --tensor-model-parallel-size 2"
    assert [text for _, text in run_ranks(2, trained_with_flipped_bit, flags, 1)] == ["", ""]


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.data())
def test_a_digest_changes_with_any_bit(values: list[float], data: st.DataObject) -> None:
    import torch

    from megatronapp_trainer.training.watch.equal_weights import digest

    tensor = torch.tensor(values, dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).clone()
    place, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 8 * tensor.element_size() - 2))
    bits[place] ^= 1 << bit
    assert int(digest(tensor)) == int(digest(tensor.clone()))
    assert int(digest(bits.view(tensor.dtype))) != int(digest(tensor))


def test_spikes_are_judged_by_the_steps_before() -> None:
    from megatronapp_trainer.training.watch.spike_alerts import LEAST, SpikeDetector

    detector = SpikeDetector(6.0)
    falling = [3.0 - 0.01 * step + 0.02 * (step % 3) for step in range(60)]
    assert [detector.judge(value) for value in falling] == [None] * 60
    spike = detector.judge(4.5)
    assert spike is not None
    assert spike.value == 4.5 and spike.deviations > 6
    assert detector.judge(float("nan")) is None
    assert detector.judge(2.45) is None, "a spike is no part of the median"
    found = [detector.judge(9.0) is not None for _ in range(2 * LEAST + 2)]
    assert found == [True] * LEAST + [False] * (LEAST + 2), "a new level"
    fresh = SpikeDetector(6.0)
    assert [fresh.judge(value) for value in (1.0, 100.0)] == [None, None], "too few steps"


def lines_of_a_spike(flags: str) -> list[str]:
    """Lines of the log of a training whose learning rate breaks it at step 20."""
    from megatronapp_trainer.training.progress import Reporter

    lines: list[str] = []
    run = small_training.prepare(flags)
    reporter = Reporter(run.config, progress=None, events=None, print_line=lines.append)
    trainer = small_training.trainer_of(run, reporter=reporter)
    for step in range(22):
        if step == 19:
            for group in run.state.optimizer.param_groups:
                group["lr"] = 3.0
        trainer.step()
    return lines


@pytest.mark.torch
def test_a_spike_is_in_the_log(run_ranks: RunRanks) -> None:
    flags = FLAGS.replace("--train-iters 4", "--train-iters 40") + " --lr-decay-style constant --log-interval 100"
    (lines,) = run_ranks(1, lines_of_a_spike, f"{flags} --loss-spike-threshold 8 --grad-norm-spike-threshold 8")
    assert any("ALERT: the loss of step 21 is" in line for line in lines)
    assert not any("of step 1" in line for line in lines), "steps before are none"


def trained(flags: str) -> list[float]:
    recorder = small_training.train(small_training.prepare(flags))
    return [] if recorder is None else recorder.losses


def profiled_trained(flags: str) -> list[float]:
    """Train; the profiler must not warn of what a user cannot change."""
    run = small_training.prepare(flags)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = small_training.train(run)
    assert [str(warning.message) for warning in caught if "rofiler" in str(warning.message)] == []
    return [] if recorder is None else recorder.losses


@pytest.mark.torch
def test_a_window_of_steps_is_profiled(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    window = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3 --profile-ranks 1"
    profiled = run_ranks(2, profiled_trained, f"{FLAGS} {window} --profile-dir {tmp_path}/profiles")
    assert profiled == run_ranks(2, trained, FLAGS)
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.name == "rank1.step1.pt.trace.json"
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 2, "two steps"


def test_memory_is_in_the_log_line_of_a_device() -> None:
    from megatronapp_trainer.training.metrics import memory_text

    assert memory_text(12.345, 14.0) == "memory (GiB): 12.35 allocated, 14.00 reserved"


REFUSALS = {
    "--use-pytorch-profiler": "needs --profile",
    "--profile-step-start 3": "--profile-step-start needs --profile",
    "--profile --profile-step-start 12": "must be above --profile-step-start 12",
    "--profile --use-pytorch-profiler --profile-step-start 4": "is not below --train-iters 4",
    "--profile --profile-dir a": "--profile-dir needs --use-pytorch-profiler",
    "--memory-snapshot-path a": "needs --record-memory-history",
    "--profile --forward-backward-disaggregating": "cannot be combined with",
    f"{CHECKED} --forward-backward-disaggregating": "cannot be combined with",
    "--loss-spike-threshold 0": "must be above 0",
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_flags_that_mean_nothing_are_refused(flags: str) -> None:
    from megatronapp_trainer.config import parse

    with pytest.raises(UsageError, match=REFUSALS[flags]):
        parse(f"{FLAGS} {flags}".split())


def test_ranks_that_do_not_exist_are_not_profiled() -> None:
    from megatronapp_trainer.config import parse
    from megatronapp_trainer.config.checks import check_world

    config = parse(f"{FLAGS} --profile --profile-step-start 1 --profile-ranks 0 2".split())
    check_world(config, 3)
    with pytest.raises(UsageError, match="--profile-ranks 2: ranks are 0 to 1"):
        check_world(config, 2)


def needs_a_gpu(flags: list[str]) -> list[str]:
    found = []
    for case in flags:
        try:
            trained(case)
        except UsageError as error:
            found.append(str(error))
    return found


@pytest.mark.torch
def test_flags_for_gpus_are_refused_without_a_gpu(run_ranks: RunRanks) -> None:
    """Each rank refuses: others would wait for it."""
    profile = f"{FLAGS} --profile --profile-step-start 1"
    for found in run_ranks(2, needs_a_gpu, [profile, f"{FLAGS} --record-memory-history"]):
        assert ["needs a GPU" in text for text in found] == [True, True]
