"""Flags of logs, evaluation and tracing."""

import dataclasses

from megatronapp_trainer.config.fields import option


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Logs and evaluation during training."""

    log_interval: int = option(100, "steps between log lines")
    eval_interval: int = option(1000, "steps between evaluations")
    eval_iters: int = option(100, "global batches of one evaluation; 0: no evaluation", bounds="[0, inf)")
    skip_train: bool = option(False, "evaluate only")
    tensorboard_dir: str | None = option(None, "write event files there")
    tensorboard_log_interval: int = option(1, "steps between events")
    trace: bool = option(False, "record spans into the trace ring")
    trace_capacity: int = option(65536, "records of the trace ring", bounds="[1, inf)")
    trace_nccl: bool = option(False, "record when NCCL's kernels ran, by its profiler plugin; needs --trace and GPUs")
    faults: str | None = option(None, "JSON list of faults for demonstration; needs --trace")
