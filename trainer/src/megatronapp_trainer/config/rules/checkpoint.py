"""Rules for the flags of checkpoints in memory."""

from collections.abc import Iterator

from megatronapp_trainer.config.checkpoint import CheckpointConfig
from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.root import TrainerConfig

_INTERVAL = "--non-persistent-save-interval"


def memory_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield a sentence for each rule that the flags break."""
    flags, plain = config.checkpoint, CheckpointConfig()
    if flags.non_persistent_save_interval is None:
        for flag, given in (
            ("--non-persistent-local-ckpt-dir", flags.non_persistent_local_ckpt_dir is not None),
            ("--replication", flags.replication),
        ):
            yield from require(not given, f"{flag} needs {_INTERVAL} STEPS")
    for flag, given in (
        ("--replication-jump", flags.replication_jump is not None),
        ("--replication-factor", flags.replication_factor != plain.replication_factor),
    ):
        yield from require(flags.replication or not given, f"{flag} needs --replication")
    if flags.non_persistent_save_interval is None:
        return
    yield from require(flags.save is not None, f"{_INTERVAL} needs --save DIRECTORY")
    yield from require(
        not config.fbd.enabled,
        f"{_INTERVAL} does not work with MegaFBD, whose forward ranks have weights without an optimizer; leave it out "
        "and use --async-save with a short --save-interval",
    )
    for flag, is_complete in (
        ("--no-save-optim", flags.save_optim),
        ("--no-save-rng", flags.save_rng),
        ("--no-load-optim", flags.load_optim),
        ("--no-load-rng", flags.load_rng),
    ):
        yield from require(is_complete, f"{_INTERVAL} saves and resumes the whole state; leave {flag} out")
