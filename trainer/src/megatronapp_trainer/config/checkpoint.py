"""Flags of checkpoints: where, when, and what is saved and loaded."""

import dataclasses

from megatronapp_trainer.config.fields import option, turned_off_by


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    save: str | None = option(None, "directory to write to")
    load: str | None = option(None, "directory to read from, where --save holds no checkpoint")
    save_interval: int | None = option(None, "steps between checkpoints", aliases=("--persistent-save-interval",))
    async_save: bool = option(False, "write checkpoints while training continues")
    async_save_exit_wait: float = option(
        600.0, "most seconds for which the end of a training waits for the write of --async-save", bounds="(0, inf)"
    )
    keep_last: int | None = option(None, "newest checkpoints to keep, never fewer than 2; default: all")
    save_optim: bool = turned_off_by("--no-save-optim", "leave the optimizer out")
    save_rng: bool = turned_off_by("--no-save-rng", "leave the random states out")
    load_optim: bool = turned_off_by("--no-load-optim", "do not read the optimizer")
    load_rng: bool = turned_off_by("--no-load-rng", "do not read the random states")
    finetune: bool = option(False, "read weights only from --load: start at step 0 with a fresh optimizer")
    exit_on_missing_checkpoint: bool = option(False, "fail if --load has no checkpoint")
    ckpt_format: str = option("torch_dist", "format", choices=("torch_dist",), aliases=("--dist-ckpt-format",))
    non_persistent_save_interval: int | None = option(
        None, "steps between checkpoints in the memory of the workers, which outlives their ranks", bounds="[1, inf)"
    )
    non_persistent_ckpt_type: str = option("local", "kind of these checkpoints", choices=("local",))
    non_persistent_local_ckpt_dir: str | None = option(
        None, "directory in memory for them; default: the job's shared memory, such as /dev/shm"
    )
    non_persistent_local_ckpt_algo: str = option(
        "atomic", "how they are divided: each rank stores its own state", choices=("atomic",)
    )
    replication: bool = option(False, "store copies of each rank's state in the memory of other workers, too")
    replication_jump: int | None = option(
        None,
        "distance in ranks between the places of a rank's state; default: the ranks of a worker, so that the next "
        "worker has the copy",
        bounds="[1, inf)",
    )
    replication_factor: int = option(2, "places of each rank's state, its own worker included", bounds="[2, inf)")
