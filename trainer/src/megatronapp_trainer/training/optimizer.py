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
    _use_common_loss_scale(optimizer)
    return optimizer


class _ScaleOfSeveral:
    """A loss scale in place of an optimizer's own, which moves with the chain of optimizers and not with a part."""

    def __init__(self, scaler: Any) -> None:  # noqa: ANN401 - MegatronGradScaler
        self._scaler = scaler

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._scaler, name)

    def update(self, found_inf: bool) -> None:
        """Do nothing: the chain updates the scale, when it knows of the overflows of all parts."""


def _use_common_loss_scale(optimizer: Any) -> None:  # noqa: ANN401 - MegatronOptimizer
    """Give chained optimizers one loss scale, which an overflow in any of them lowers.

    megatron-core 0.16 gives each a scale that sees its own overflows alone, and multiplies the loss by that of the
    first. After an overflow of the experts alone, their gradients would be divided by another scale than the loss was
    multiplied by.
    """
    parts = getattr(optimizer, "chained_optimizers", [])
    scaler = parts[0].grad_scaler if parts and hasattr(parts[0], "grad_scaler") else None
    if len(parts) < 2 or scaler is None:
        return
    for part in parts:
        part.grad_scaler = _ScaleOfSeveral(scaler)
    prepare_grads = optimizer.prepare_grads

    def prepare_and_update() -> bool:
        found_inf: bool = prepare_grads()
        scaler.update(found_inf)
        return found_inf

    optimizer.prepare_grads = prepare_and_update


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
