"""Schedules of learning rate and weight decay."""

import dataclasses
from typing import Any

from megatronapp_trainer.config import OptimizerConfig, TrainerConfig
from megatronapp_trainer.config.batch_size import BatchSchedule


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleLengths:
    """Lengths of the schedules, in samples."""

    training: int
    decay: int
    warmup: float
    last_phase: int | None
    """Length of the last phase of WSD."""


def schedule_lengths(config: TrainerConfig, batches: BatchSchedule) -> ScheduleLengths:
    """Return the samples of the schedules, exact under a ramp-up too: the steps are counted with their sizes."""
    ours, training = config.optimizer, config.training
    if training.train_samples is not None:
        total = training.train_samples
        decay = ours.lr_decay_samples or total
        warmup: float = ours.lr_warmup_samples
        last_phase = ours.lr_wsd_decay_samples
        if ours.lr_warmup_fraction is not None:
            warmup = ours.lr_warmup_fraction * decay
    else:
        total = batches.samples_of(training.train_iters)
        decay_iters = ours.lr_decay_iters or training.train_iters
        decay = batches.samples_of(decay_iters)
        warmup = batches.samples_of(ours.lr_warmup_iters)
        last_iters = ours.lr_wsd_decay_iters
        last_phase = None if last_iters is None else decay - batches.samples_of(max(0, decay_iters - last_iters))
        if ours.lr_warmup_fraction is not None:
            # Rounded in this order, the product is that of earlier releases, with whose checkpoints it is compared.
            warmup = ours.lr_warmup_fraction * decay_iters * (decay / decay_iters)
    return ScheduleLengths(total, decay, warmup, last_phase)


def build_scheduler(config: TrainerConfig, optimizer: Any, batches: BatchSchedule) -> Any:  # noqa: ANN401
    """Build megatron-core's scheduler; its steps are samples, as a ramp-up changes the samples of an iteration."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    ours, lengths = config.optimizer, schedule_lengths(config, batches)
    start, end = weight_decay_ends(ours)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=ours.lr_warmup_init,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=lengths.warmup,
        lr_decay_steps=lengths.decay,
        lr_decay_style=ours.lr_decay_style,
        start_wd=start,
        end_wd=end,
        wd_incr_steps=lengths.training,
        wd_incr_style=ours.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=ours.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=ours.override_opt_param_scheduler,
        wsd_decay_steps=lengths.last_phase,
        lr_wsd_decay_style=ours.lr_wsd_decay_style,
    )


def weight_decay_ends(config: OptimizerConfig) -> tuple[float, float]:
    """Return first and last weight decay."""
    if config.start_weight_decay is None or config.end_weight_decay is None:
        return config.weight_decay, config.weight_decay
    return config.start_weight_decay, config.end_weight_decay


def learning_rate(optimizer: Any) -> float:  # noqa: ANN401 - MegatronOptimizer
    """Return the rate of the groups that follow the common schedule."""
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

    rate: float | None = get_canonical_lr_for_logging(optimizer.param_groups)
    if rate is None:
        rate = float(optimizer.param_groups[0]["lr"])
    return rate
