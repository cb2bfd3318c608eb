"""Rules for the schedules of learning rate and weight decay."""

from collections.abc import Iterator

from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.optimizer import OptimizerConfig
from megatronapp_trainer.config.root import TrainerConfig


def _lengths(config: TrainerConfig) -> Iterator[str]:
    """Check that lengths are given in steps or in samples, all in the same unit."""
    training, optimizer = config.training, config.optimizer
    steps = {
        "--lr-decay-iters": optimizer.lr_decay_iters,
        "--lr-warmup-iters": optimizer.lr_warmup_iters,
        "--lr-wsd-decay-iters": optimizer.lr_wsd_decay_iters,
    }
    samples = {
        "--lr-decay-samples": optimizer.lr_decay_samples,
        "--lr-warmup-samples": optimizer.lr_warmup_samples,
        "--lr-wsd-decay-samples": optimizer.lr_wsd_decay_samples,
    }
    if training.train_samples is None:
        for flag, value in samples.items():
            yield from require(not value, f"{flag} needs --train-samples; with --train-iters give {_in_steps(flag)}")
        return
    yield from require(training.train_iters == 0, "give --train-iters or --train-samples, not both")
    for flag, value in steps.items():
        instead = flag.replace("iters", "samples")
        yield from require(not value, f"{flag} cannot be combined with --train-samples; give {instead} instead")
    batch = training.global_batch_size
    if not (
        yield from require(
            batch is not None, "--train-samples needs --global-batch-size, which determines the number of steps"
        )
    ):
        return
    first = batch if training.rampup_batch_size is None else training.rampup_batch_size[0]
    yield from require(
        first is not None and training.train_samples >= first,
        f"--train-samples {training.train_samples} is less than one step of {first}",
    )
    decay = optimizer.lr_decay_samples or training.train_samples
    yield from require(
        optimizer.lr_warmup_samples < decay,
        f"--lr-warmup-samples {optimizer.lr_warmup_samples} must be below the {decay} samples of the decay "
        "(--lr-decay-samples, or --train-samples)",
    )


def _in_steps(flag: str) -> str:
    return flag.replace("samples", "iters")


def _schedules(config: TrainerConfig) -> Iterator[str]:
    optimizer, steps = config.optimizer, config.optimizer.lr_decay_iters or config.training.train_iters
    yield from require(optimizer.min_lr <= optimizer.lr, f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}")
    yield from _decoupled(optimizer)
    yield from require(optimizer.lr_warmup_init <= optimizer.lr, "--lr-warmup-init is above --lr")
    fraction = optimizer.lr_warmup_fraction
    yield from require(fraction is None or 0 <= fraction < 1, "--lr-warmup-fraction must lie in [0, 1)")
    yield from require(
        fraction is None or optimizer.lr_warmup_iters == 0, "give --lr-warmup-fraction or --lr-warmup-iters, not both"
    )
    yield from require(
        fraction is None or optimizer.lr_warmup_samples == 0,
        "give --lr-warmup-fraction or --lr-warmup-samples, not both",
    )
    yield from require(
        config.training.train_samples is not None or optimizer.lr_warmup_iters < steps,
        f"--lr-warmup-iters {optimizer.lr_warmup_iters} must be below the {steps} steps of the decay "
        "(--lr-decay-iters, or --train-iters)",
    )
    yield from _last_phase(config)
    yield from _weight_decay(optimizer)
    yield from require(
        not (optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler),
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other",
    )


def _decoupled(optimizer: OptimizerConfig) -> Iterator[str]:
    largest, least = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if largest is None:
        yield from require(least is None, "--decoupled-min-lr needs --decoupled-lr")
        return
    flag = "--min-lr" if least is None else "--decoupled-min-lr"
    least = optimizer.min_lr if least is None else least
    yield from require(least <= largest, f"{flag} {least} is above --decoupled-lr {largest}")


def _last_phase(config: TrainerConfig) -> Iterator[str]:
    optimizer, training = config.optimizer, config.training
    if optimizer.lr_decay_style != "WSD":
        return
    if training.train_samples is None:
        flag, phase = "iters", optimizer.lr_wsd_decay_iters
        decay = optimizer.lr_decay_iters or training.train_iters
    else:
        flag, phase = "samples", optimizer.lr_wsd_decay_samples
        decay = optimizer.lr_decay_samples or training.train_samples
    if not phase:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters (with --train-samples: --lr-wsd-decay-samples)"
        return
    yield from require(
        phase <= decay,
        f"--lr-wsd-decay-{flag} {phase} is longer than the decay of {decay} (--lr-decay-{flag}, or --train-{flag}), "
        f"whose last phase it is; give {decay} or less",
    )


def _weight_decay(optimizer: OptimizerConfig) -> Iterator[str]:
    growing = optimizer.weight_decay_incr_style != "constant"
    given = (optimizer.start_weight_decay is not None, optimizer.end_weight_decay is not None)
    yield from require(
        all(given) if growing else not any(given),
        "--start-weight-decay and --end-weight-decay belong to --weight-decay-incr-style linear or cosine",
    )
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if growing and start is not None and end is not None:
        yield from require(
            start <= end, f"--end-weight-decay {end} is below --start-weight-decay {start}; weight decay can only grow"
        )


SCHEDULE_RULES = (_lengths, _schedules)
"""Rules that yield sentences, one for each problem of a configuration."""
