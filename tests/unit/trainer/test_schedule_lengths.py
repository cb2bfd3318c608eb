"""Learning-rate schedules under a batch ramp-up, and in samples: lengths are those that were asked for."""

import itertools
import math
import shlex
from typing import Any

import pytest

from megatronapp_trainer.config import parse
from megatronapp_trainer.config.batch_size import batch_schedule
from megatronapp_trainer.data.request import sample_counts
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports

pytestmark = pytest.mark.torch

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --mock-data "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --min-lr 1e-5"
)
RAMP = "--rampup-batch-size 2 2 100"


class FakeParamGroup:
    """Part of an optimizer that megatron-core's scheduler touches."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"wd_mult": 1.0}]


def rates_of(flags: str) -> list[float]:
    """The learning rate after each step, and before the first."""
    from megatronapp_trainer.training.learning_rate import build_scheduler

    config, optimizer = parse(shlex.split(f"{MODEL} {flags}")), FakeParamGroup()
    batches = batch_schedule(config, data_size=1)
    with silence_megatron_imports():
        scheduler = build_scheduler(config, optimizer, batches)
    rates, consumed = [optimizer.param_groups[0]["lr"]], 0
    for _ in range(config.training.train_iters):
        size = batches.global_batch_size(consumed)
        scheduler.step(size)
        consumed += size
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("ramp", ["", RAMP])
@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_warm_up_and_decay_last_as_many_steps_as_they_are_given(ramp: str, style: str) -> None:
    rates = rates_of(f"{ramp} --train-iters 20 --lr-warmup-iters 4 --lr-decay-style {style}")
    assert len(rates) == 21
    assert rates[4] == pytest.approx(1e-3)
    assert max(rates) == rates[4]
    assert rates[20] == pytest.approx(1e-5)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[4:]))


def test_under_a_ramp_up_rates_follow_samples() -> None:
    """Steps of 2, 4, 6 and 8 samples, 6 / 7 of 100 / 7 samples at first."""
    rates, consumed = rates_of(f"{RAMP} --train-iters 20 --lr-warmup-iters 4 --lr-decay-style cosine"), [0]
    config = parse(shlex.split(f"{MODEL} {RAMP} --train-iters 20"))
    batches = batch_schedule(config, data_size=1)
    for _ in range(20):
        consumed.append(consumed[-1] + batches.global_batch_size(consumed[-1]))
    assert consumed[-1] < 20 * 16
    for step in range(4, 21):
        ratio = (consumed[step] - consumed[4]) / (consumed[20] - consumed[4])
        assert rates[step] == pytest.approx(1e-5 + (1e-3 - 1e-5) * 0.5 * (math.cos(math.pi * ratio) + 1))
    assert sample_counts(config, 1)[0] == consumed[-1]


def test_the_last_phase_of_wsd_lasts_its_steps() -> None:
    flags = "--train-iters 20 --lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style linear"
    rates = rates_of(f"{RAMP} {flags}")
    assert rates[15] == pytest.approx(1e-3)
    assert rates[16] < 1e-3
    assert rates[20] == pytest.approx(1e-5)


@pytest.mark.parametrize("ramp", ["", RAMP])
def test_lengths_in_samples(ramp: str) -> None:
    flags = f"{ramp} --train-samples 320 --lr-warmup-samples 64 --lr-decay-samples 240 --lr-decay-style linear"
    rates = rates_of(flags)
    config = parse(shlex.split(f"{MODEL} {flags}"))
    batches, consumed = batch_schedule(config, data_size=1), 0
    for rate in rates:
        warm, decayed = consumed / 64, (240 - consumed) / (240 - 64)
        expected = 1e-3 * warm if consumed <= 64 else max(1e-5, 1e-5 + (1e-3 - 1e-5) * decayed)
        assert rate == pytest.approx(expected)
        consumed += batches.global_batch_size(consumed)
    assert sample_counts(config, 1)[0] == 320


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-iters 5 --train-samples 80", "give --train-iters or --train-samples, not both"),
        ("--train-samples 80 --lr-warmup-iters 2", "give --lr-warmup-samples instead"),
        ("--train-samples 80 --lr-decay-iters 2", "give --lr-decay-samples instead"),
        ("--train-iters 5 --lr-decay-samples 80", "--lr-decay-samples needs --train-samples"),
        ("--train-iters 5 --lr-warmup-samples 8", "with --train-iters give --lr-warmup-iters"),
        ("--train-samples 8", "--train-samples 8 is less than one step of 16"),
        ("--train-samples 80 --lr-warmup-samples 80", "must be below the 80 samples of the decay"),
        ("--train-samples 80 --lr-decay-style WSD", "--lr-wsd-decay-samples"),
    ],
)
def test_lengths_that_do_not_fit_together(flags: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(shlex.split(f"{MODEL} {flags}"))
    assert message in str(caught.value)


def test_samples_need_the_size_of_a_step() -> None:
    with pytest.raises(UsageError, match="--train-samples needs --global-batch-size"):
        parse(shlex.split(f"{MODEL} --train-samples 80".replace("--global-batch-size 16", "")))


@pytest.mark.parametrize(("fraction", "iterations"), [(0.001, 100), (0.01, 30), (0.05, 7), (0.1, 11), (0.3, 999)])
def test_a_warm_up_by_a_fraction_is_rounded_as_in_earlier_releases(fraction: float, iterations: int) -> None:
    """A checkpoint of theirs holds this number, and is refused if this run's differs in the last bit."""
    from megatronapp_trainer.training.learning_rate import schedule_lengths

    config = parse(shlex.split(f"{MODEL} --train-iters {iterations} --lr-warmup-fraction {fraction}"))
    lengths = schedule_lengths(config, batch_schedule(config, data_size=1))
    assert lengths.warmup == fraction * iterations * 16
