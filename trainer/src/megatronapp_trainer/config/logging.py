"""Flags of logs, evaluation and tracing."""

import dataclasses

from megatronapp_trainer.config.fields import option

DEFAULT_TRACE_INTERVAL = 1000
DEFAULT_TRACE_ITERATIONS = 1
DEFAULT_TRACE_GRANULARITY = "full"
"""MegatronApp's defaults, which hold once one of its flags of windows is given."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceWindows:
    """Windows that recur: `count` steps in each `interval` steps."""

    interval: int
    count: int
    granularity: str
    """`base`: tensor-parallel collectives; `full`: parts of layers, too."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Logs and evaluation during training."""

    log_interval: int = option(100, "steps between log lines")
    eval_interval: int = option(1000, "steps between evaluations")
    eval_iters: int = option(100, "global batches of one evaluation; 0: no evaluation", bounds="[0, inf)")
    skip_train: bool = option(False, "evaluate only")
    full_validation: bool = option(False, "evaluate on all validation samples, each once, instead of --eval-iters")
    multiple_validation_sets: bool = option(
        False, "evaluate the prefixes of --valid-data-path separately, each with a separate loss"
    )
    validation_set_names: tuple[str, ...] | None = option(
        None, "names of the sets of --multiple-validation-sets, in their order; default: 0, 1, ..."
    )
    log_loss_per_source: bool = option(False, "report the loss of each prefix of a blend, too")
    tensorboard_dir: str | None = option(None, "write event files there")
    tensorboard_log_interval: int = option(1, "steps between events, also of Weights & Biases")
    tensorboard_queue_size: int = option(10, "events that may wait before they are written", bounds="[1, inf)")
    wandb_project: str | None = option(None, "write events to this project of Weights & Biases")
    wandb_entity: str | None = option(None, "team or user that owns the project; default: that of the key")
    wandb_exp_name: str | None = option(None, "name of the run; default: that of the job")
    wandb_save_dir: str | None = option(None, "folder of the run's files; default: wandb, in --save if given")
    trace: bool = option(False, "record spans into the trace ring")
    trace_capacity: int = option(65536, "records of the trace ring", bounds="[1, inf)")
    trace_nccl: bool = option(False, "record when NCCL's kernels ran, by its profiler plugin; needs --trace and GPUs")
    trace_dir: str | None = option(
        None, "write the steps of the windows to this folder, in files of MegatronApp's form, one per rank"
    )
    trace_interval: int | None = option(
        None,
        "steps from one window of detailed spans to the next; 1000 with another flag of windows",
        bounds="[1, inf)",
    )
    continuous_trace_iterations: int | None = option(None, "steps of a window; 1 by default", bounds="[1, inf)")
    trace_granularity: str | None = option(
        None,
        "spans in windows besides phases: base: tensor-parallel collectives, full (default): layers, too",
        choices=("base", "full"),
    )
    trace_budget: float = option(
        1.0,
        "percent of a rank's time that windows may cost; beyond it they are not recorded, unless for --trace-dir",
        bounds="(0, 100]",
    )
    faults: str | None = option(None, "JSON list of faults for demonstration; needs --trace")

    @property
    def trace_windows(self) -> TraceWindows | None:
        """Windows by flags; None without one of these flags."""
        given = (self.trace_dir, self.trace_interval, self.continuous_trace_iterations, self.trace_granularity)
        if all(value is None for value in given):
            return None
        return TraceWindows(
            interval=self.trace_interval or DEFAULT_TRACE_INTERVAL,
            count=self.continuous_trace_iterations or DEFAULT_TRACE_ITERATIONS,
            granularity=self.trace_granularity or DEFAULT_TRACE_GRANULARITY,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """Checks, alerts and profiles of a running training."""

    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        "steps between checks that all replicas have the same weights; a difference ends the training",
        bounds="[1, inf)",
    )
    loss_spike_threshold: float | None = option(
        None,
        "report steps whose loss is this many deviations above the median of the last 64",
        bounds="(0, inf)",
    )
    grad_norm_spike_threshold: float | None = option(None, "the same for the norm of the gradients", bounds="(0, inf)")
    profile: bool = option(False, "profile some steps: with --use-pytorch-profiler, or for Nsight Systems")
    use_pytorch_profiler: bool = option(False, "profile by torch's profiler; needs --profile")
    profile_step_start: int = option(10, "first profiled step, counted from 0", bounds="[0, inf)")
    profile_step_end: int = option(12, "step before which the profile ends", bounds="[1, inf)")
    profile_ranks: tuple[int, ...] = option((0,), "ranks that are profiled")
    profile_dir: str | None = option(None, "folder of torch's profiles; default: --tensorboard-dir, or the current one")
    record_memory_history: bool = option(False, "record allocations, and write them if the memory of a GPU runs out")
    memory_snapshot_path: str = option("snapshot.pickle", "file of --record-memory-history; each rank adds its number")
