"""Rules for the flags of checks, alerts and profiles."""

from collections.abc import Iterator

from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.logging import WatchConfig
from megatronapp_trainer.config.root import TrainerConfig


def watch_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break."""
    watch, plain = config.watch, WatchConfig()
    for name in ("use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks", "profile_dir"):
        given = getattr(watch, name) != getattr(plain, name)
        yield from require(watch.profile or not given, f"--{name.replace('_', '-')} needs --profile")
    yield from require(
        watch.profile_step_start < watch.profile_step_end,
        f"--profile-step-end {watch.profile_step_end} must be above --profile-step-start {watch.profile_step_start}",
    )
    steps = config.training.train_iters
    yield from require(
        not watch.profile or config.training.train_samples is not None or watch.profile_step_start < max(steps, 1),
        f"--profile-step-start {watch.profile_step_start} is not below --train-iters {steps}, so nothing would be "
        "profiled; give a step before",
    )
    yield from require(
        watch.profile_dir is None or watch.use_pytorch_profiler, "--profile-dir needs --use-pytorch-profiler"
    )
    yield from require(
        watch.record_memory_history or watch.memory_snapshot_path == plain.memory_snapshot_path,
        "--memory-snapshot-path needs --record-memory-history",
    )
    for flag, on in (
        ("--profile", watch.profile),
        (
            "--check-weight-hash-across-dp-replicas-interval",
            watch.check_weight_hash_across_dp_replicas_interval is not None,
        ),
    ):
        yield from require(
            not (on and config.fbd.enabled),
            f"{flag} cannot be combined with --forward-backward-disaggregating yet; leave it out",
        )
