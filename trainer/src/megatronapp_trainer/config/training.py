"""Flags of batches, the length of training, and its control while it runs."""

import dataclasses

from megatronapp_trainer.config.fields import option, turned_off_by


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Batches and length of training."""

    micro_batch_size: int = option(0, "samples of one forward pass (required)")
    global_batch_size: int | None = option(None, "samples of one step over all replicas; default: one microbatch each")
    rampup_batch_size: tuple[int, ...] | None = option(
        None, "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES samples"
    )
    train_iters: int = option(0, "steps of the whole training (this or --train-samples is required)")
    train_samples: int | None = option(
        None,
        "samples of the whole training, instead of --train-iters; no step begins that would exceed them",
    )
    seed: int = option(1234, "of weights, dropout and data order", bounds="[0, 4294967295]")
    calculate_per_token_loss: bool = option(
        False,
        "weigh gradients by tokens over the whole batch; by default each microbatch weighs the same in gradients, "
        "however few of its tokens count, while the reported loss is always a mean over tokens",
    )
    check_for_nan: bool = turned_off_by("--no-check-for-nan-in-loss-and-grad", "train on when a loss is NaN or Inf")
    exit_interval: int | None = option(None, "end after a step that is a multiple of this")
    exit_duration_in_mins: float | None = option(None, "end after this many minutes", bounds="(0, inf)")
    manual_gc: bool = option(False, "collect garbage at fixed steps, so that all ranks pause together")
    manual_gc_interval: int = option(
        0, "steps between collections with --manual-gc; 0: only before evaluation and saving", bounds="[0, inf)"
    )
    manual_gc_eval: bool = turned_off_by("--no-manual-gc-eval", "no collection around evaluation with --manual-gc")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControlConfig:
    """Control of a running training: pause, resume, step, stop."""

    training_control: bool = option(False, "obey orders from the job's hub at step boundaries")
    training_start_paused: bool = option(False, "pause before the first step; needs --training-control")
    training_resume_after: float | None = option(
        None,
        "resume a paused training after this many seconds in which no client controls it; needs --training-control",
        bounds="(0, inf)",
    )
    scope_capture_interval: int | None = option(
        None, "steps between two captures of the statistics of layers, for the job's hub", bounds="[1, inf)"
    )
    scope_capture_not_finite: bool = turned_off_by(
        "--no-scope-capture-not-finite",
        "where steps are captured, do not compute a step again, captured, whose loss or gradient norm is not finite",
    )
    scope_probe_texts: str | None = option(
        None, "JSON list of texts that are run through the weights after each captured step, for the job's hub"
    )
    training_ws_port: int | None = option(
        None,
        "of MegatronApp: --training-control with --training-start-paused; pages are at the job's hub, and no server "
        "listens at this port",
        bounds="[1, 65535]",
    )

    @property
    def enabled(self) -> bool:
        """Return whether orders are obeyed."""
        return self.training_control or self.training_ws_port is not None

    @property
    def starts_paused(self) -> bool:
        """Return whether the training pauses before its first step."""
        return self.training_start_paused or self.training_ws_port is not None
