"""Adam with megatron-core's mixed precision or distributed optimizer."""

from typing import Any

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.training import optimizer_kernels


def build_optimizer(config: TrainerConfig, chunks: list[Any]) -> Any:  # noqa: ANN401 - MegatronOptimizer
    """Build the optimizer over all chunks. Biases and norms (tensors of one axis) get no weight decay."""
    from megatron.core.optimizer import OptimizerConfig as CoreConfig
    from megatron.core.optimizer import get_megatron_optimizer

    ours, precision = config.optimizer, config.precision
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
        bf16=precision.bf16,
        fp16=precision.fp16,
        params_dtype=precision.dtype,
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
        barrier_with_L1_time=False,
    )
    optimizer_kernels.install()
    optimizer = get_megatron_optimizer(core, chunks, config_overrides=_group_overrides(core))
    optimizer_kernels.fuse_adam(optimizer)
    return optimizer


def _group_overrides(core: Any) -> dict[Any, Any]:  # noqa: ANN401 - untyped library
    """Return megatron-core's settings of parameter groups. On loading, it takes groups that differ in their rates alone
    for equal, unless the decoupled ones are marked.
    """
    from megatron.core.optimizer import get_standard_config_overrides

    overrides: dict[Any, Any] = get_standard_config_overrides(core)
    return {
        key: {**values, **({"is_decoupled_lr": True} if "max_lr" in values else {})}
        for key, values in overrides.items()
    }
