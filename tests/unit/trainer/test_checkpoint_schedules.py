"""Resuming with other schedules is refused with the flags' names, or done where a flag says how."""

import dataclasses
from typing import Any

import pytest

from megatronapp_trainer.checkpoint import resume_rates
from megatronapp_trainer.config import DataConfig, ModelConfig, OptimizerConfig, TrainerConfig, TrainingConfig
from megatronapp_trainer.config.batch_size import BatchSchedule
from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports

OPTIMIZER = OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_warmup_iters=2, lr_decay_style="cosine")


def config_with(train_iters: int = 3000, **optimizer: Any) -> TrainerConfig:
    return TrainerConfig(
        model=ModelConfig(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32),
        training=TrainingConfig(micro_batch_size=1, train_iters=train_iters),
        optimizer=dataclasses.replace(OPTIMIZER, **optimizer),
        data=DataConfig(mock_data=True, vocab_size=100),
    )


class NoOptimizer:
    """Part of an optimizer that megatron-core's scheduler touches."""

    param_groups: tuple[Any, ...] = ()


def scheduler_of(config: TrainerConfig, batch: int) -> Any:
    from megatronapp_trainer.training.learning_rate import build_scheduler

    with silence_megatron_imports():
        return build_scheduler(config, NoOptimizer(), BatchSchedule(micro_batch_size=1, data_size=1, final=batch))


def refusal(config: TrainerConfig, batch: int = 8) -> str | None:
    there, here = (scheduler_of(*which).state_dict() for which in ((config_with(), 8), (config, batch)))
    return resume_rates.conflict(there, here, arguments_there={"--train-iters": 3000}, config=config, optimizer=True)


def test_the_same_schedules_are_accepted_on_resume() -> None:
    assert refusal(config_with()) is None


def test_a_shortened_run_is_reported_in_iterations() -> None:
    reason = refusal(config_with(2600))
    assert reason is not None
    assert "--train-iters (spec.training.trainIters): 3000 iterations there, 2600 iterations here" in reason
    assert "--lr-decay-iters (spec.training.lrDecayIters, by default trainIters): 3000 iterations there" in reason
    assert "--override-opt_param-scheduler" in reason
    assert "--use-checkpoint-opt_param-scheduler" in reason
    assert "--lr-warmup" not in reason


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lr": 2e-3}, "--lr (spec.training.lr): 0.001 there, 0.002 here"),
        ({"min_lr": 0.0}, "--min-lr (spec.training.minLr): 0.0001 there, 0.0 here"),
        ({"lr_warmup_iters": 5}, "--lr-warmup-iters (spec.training.lrWarmupIters): 2 iterations there, 5 iterations"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 0}, "--lr-warmup-fraction (spec.training.lrWarmupFraction): 2"),
        ({"lr_decay_iters": 50}, "--lr-decay-iters (spec.training.lrDecayIters"),
        ({"lr_decay_style": "linear"}, "--lr-decay-style (spec.training.lrDecayStyle): cosine there, linear here"),
        ({"weight_decay": 0.1}, "--weight-decay (spec.training.weightDecay): 0.01 there, 0.1 here"),
        (
            {"weight_decay_incr_style": "linear", "start_weight_decay": 0.02, "end_weight_decay": 0.1},
            "--end-weight-decay (spec.training.endWeightDecay): 0.01 there, 0.1 here",
        ),
    ],
)
def test_each_value_that_the_scheduler_compares(changed: dict[str, Any], message: str) -> None:
    reason = refusal(config_with(**changed))
    assert reason is not None
    assert message in reason
    assert reason.count("--weight-decay (") <= 1
    stored = scheduler_of(config_with(), 8).state_dict()
    with pytest.raises(AssertionError):
        scheduler_of(config_with(**changed), 8).load_state_dict(stored)


@pytest.mark.parametrize("train_samples", [None, 24_000])
def test_lengths_that_round_to_the_same_are_shown_in_full(train_samples: int | None) -> None:
    here = config_with(lr_warmup_fraction=0.1 + 1e-13, lr_warmup_iters=0)
    there = config_with(lr_warmup_fraction=0.1, lr_warmup_iters=0)
    if train_samples is not None:
        here, there = (
            dataclasses.replace(config, training=dataclasses.replace(config.training, train_samples=train_samples))
            for config in (here, there)
        )
    states = [scheduler_of(config, 8).state_dict() for config in (there, here)]
    arguments = {"--train-iters": 3000, "--train-samples": train_samples}
    reason = resume_rates.conflict(*states, arguments_there=arguments, config=here, optimizer=True)
    assert reason is not None
    assert "--lr-warmup-fraction (spec.training.lrWarmupFraction): 2400.0 samples there, 2400.00000000" in reason


def test_another_global_batch_is_named_by_itself() -> None:
    reason = refusal(config_with(), batch=16)
    assert reason is not None
    assert "--global-batch-size (spec.training.globalBatchSize): 8 there, 16 here; give" in reason
    assert "iterations there" not in reason


def test_steps_that_were_counted_in_full_are_the_reason_under_a_ramp_up() -> None:
    config = config_with()
    ramp = dataclasses.replace(config.training, global_batch_size=8, rampup_batch_size=(2, 2, 100))
    config = dataclasses.replace(config, training=ramp)
    here = scheduler_of(config, 8).state_dict()
    there = {**here, "lr_decay_steps": here["lr_decay_steps"] + 1}
    message = "took the steps of --rampup-batch-size for full ones"
    for stored, found in (({}, True), ({"--train-samples": None}, False)):
        arguments = {"--train-iters": 3000, **stored}
        reason = resume_rates.conflict(there, here, arguments_there=arguments, config=config, optimizer=True)
        assert (message in str(reason)) == found


@pytest.mark.parametrize(
    ("flag", "length_samples"),
    [("override_opt_param_scheduler", 5000 * 8), ("use_checkpoint_opt_param_scheduler", 3000 * 8)],
)
def test_flags_that_override_the_schedule_are_accepted(flag: str, length_samples: int) -> None:
    config = config_with(5000, **{flag: True})
    assert refusal(config) is None
    scheduler = scheduler_of(config, 8)
    scheduler.load_state_dict(scheduler_of(config_with(), 8).state_dict())
    assert scheduler.lr_decay_steps == length_samples
