"""Flags of the optimizer, the learning rate and weight decay."""

import dataclasses

from megatronapp_trainer.config.fields import option


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer and its schedules."""

    optimizer: str = option("adam", "kind", choices=("adam",))
    lr: float = option(0.0, "largest learning rate (required)")
    min_lr: float = option(0.0, "where the decay ends", bounds="[0, inf)")
    lr_decay_style: str = option(
        "linear",
        "shape of the decay",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = option(None, "steps of the decay; default: --train-iters", bounds="[1, inf)")
    lr_decay_samples: int | None = option(
        None, "samples of the decay, with --train-samples; default: --train-samples", bounds="[1, inf)"
    )
    lr_warmup_iters: int = option(0, "steps of linear warm-up", bounds="[0, inf)")
    lr_warmup_samples: int = option(0, "samples of linear warm-up, with --train-samples", bounds="[0, inf)")
    lr_warmup_fraction: float | None = option(None, "warm-up as a share of the decay, instead of --lr-warmup-iters")
    lr_warmup_init: float = option(0.0, "where the warm-up begins", bounds="[0, inf)")
    lr_wsd_decay_style: str = option(
        "exponential", "last phase of WSD", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = option(None, "steps of WSD's last phase", bounds="[1, inf)")
    lr_wsd_decay_samples: int | None = option(
        None, "samples of WSD's last phase, with --train-samples", bounds="[1, inf)"
    )
    weight_decay: float = option(0.01, "decoupled weight decay; not on biases and norms", bounds="[0, inf)")
    start_weight_decay: float | None = option(None, "where an increasing weight decay begins", bounds="[0, inf)")
    end_weight_decay: float | None = option(None, "where it ends", bounds="[0, inf)")
    weight_decay_incr_style: str = option("constant", "how it grows", choices=("constant", "linear", "cosine"))
    clip_grad: float = option(
        1.0, "largest norm of all gradients together; 0: no clipping, the norm is only logged", bounds="[0, inf)"
    )
    adam_beta1: float = option(0.9, "decay of the first moment", bounds="[0, 1)")
    adam_beta2: float = option(0.999, "decay of the second moment", bounds="[0, 1)")
    adam_eps: float = option(1e-8, "added to the root of the second moment", bounds="[0, inf)")
    decoupled_lr: float | None = option(None, "learning rate of input and output embedding", bounds="(0, inf)")
    decoupled_min_lr: float | None = option(None, "where its decay ends", bounds="[0, inf)")
    override_opt_param_scheduler: bool = option(
        False,
        "schedules from the flags, not from the checkpoint",
        flag="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "schedules from the checkpoint, not from the flags",
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )
