"""Adam with megatron-core's mixed precision or distributed optimizer, and the schedules of rate and weight decay."""

from typing import Any

import torch

from megatronapp_trainer.config import OptimizerConfig, TrainerConfig


def build_optimizer(config: TrainerConfig, chunks: list[Any]) -> Any:  # noqa: ANN401 - MegatronOptimizer
    """The optimizer over all chunks. Biases and norms (tensors of one axis) get no weight decay."""
    from megatron.core.optimizer import OptimizerConfig as CoreConfig
    from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides

    ours = config.optimizer
    core = CoreConfig(
        optimizer=ours.optimizer,
        lr=ours.lr,
        min_lr=ours.min_lr,
        decoupled_lr=ours.decoupled_lr,
        decoupled_min_lr=ours.decoupled_min_lr,
        weight_decay=ours.weight_decay,
        clip_grad=ours.clip_grad,
        adam_beta1=ours.adam_beta1,
        adam_beta2=ours.adam_beta2,
        adam_eps=ours.adam_eps,
        bf16=config.precision.bf16,
        params_dtype=torch.bfloat16 if config.precision.bf16 else torch.float32,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
        barrier_with_L1_time=False,
    )
    return get_megatron_optimizer(core, chunks, config_overrides=get_standard_config_overrides(core))


def build_scheduler(config: TrainerConfig, optimizer: Any, *, global_batch_size: int) -> Any:  # noqa: ANN401
    """megatron-core's scheduler; its steps are samples, as a ramp-up changes the samples of an iteration."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    ours = config.optimizer
    decay_iters = ours.lr_decay_iters or config.training.train_iters
    start, end = weight_decay_ends(ours)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=ours.lr_warmup_init,
        max_lr=ours.lr,
        min_lr=ours.min_lr,
        lr_warmup_steps=warmup_samples(ours, decay_iters, global_batch_size),
        lr_decay_steps=decay_iters * global_batch_size,
        lr_decay_style=ours.lr_decay_style,
        start_wd=start,
        end_wd=end,
        wd_incr_steps=config.training.train_iters * global_batch_size,
        wd_incr_style=ours.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=ours.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=ours.override_opt_param_scheduler,
        wsd_decay_steps=None if ours.lr_wsd_decay_iters is None else ours.lr_wsd_decay_iters * global_batch_size,
        lr_wsd_decay_style=ours.lr_wsd_decay_style,
    )


def warmup_samples(config: OptimizerConfig, decay_iters: int, global_batch_size: int) -> float:
    """Samples of the warm-up."""
    if config.lr_warmup_fraction is not None:
        return config.lr_warmup_fraction * decay_iters * global_batch_size
    return config.lr_warmup_iters * global_batch_size


def weight_decay_ends(config: OptimizerConfig) -> tuple[float, float]:
    """First and last weight decay."""
    if config.start_weight_decay is None or config.end_weight_decay is None:
        return config.weight_decay, config.weight_decay
    return config.start_weight_decay, config.end_weight_decay


def learning_rate(optimizer: Any) -> float:  # noqa: ANN401 - MegatronOptimizer
    """The rate of the groups that follow the common schedule."""
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

    rate: float | None = get_canonical_lr_for_logging(optimizer.param_groups)
    if rate is None:
        rate = float(optimizer.param_groups[0]["lr"])
    return rate
