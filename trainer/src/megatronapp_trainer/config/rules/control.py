"""Rules on the control of a running training."""

from collections.abc import Iterator

from megatronapp_trainer.config.fields import require
from megatronapp_trainer.config.root import TrainerConfig


def control_problems(config: TrainerConfig) -> Iterator[str]:
    """Yield flags that do nothing without others."""
    control = config.control
    for flag, given in (
        ("--training-start-paused", control.training_start_paused),
        ("--training-resume-after", control.training_resume_after is not None),
    ):
        yield from require(
            control.enabled or not given, f"{flag} needs --training-control; add it, or leave {flag} out"
        )
    yield from require(
        control.scope_probe_texts is None or control.enabled or control.scope_capture_interval is not None,
        "--scope-probe-texts are run after captured steps; add --scope-capture-interval or --training-control",
    )
    yield from require(
        control.scope_capture_not_finite or control.enabled or control.scope_capture_interval is not None,
        "--no-scope-capture-not-finite is about captured trainings; add --scope-capture-interval or "
        "--training-control, or leave it out",
    )
    yield from require(
        control.scope_capture_interval is None or not config.logging.skip_train,
        "--scope-capture-interval captures training steps, and --skip-train runs none; leave one of them out",
    )
    yield from require(
        not (control.enabled and config.logging.skip_train),
        "--training-control has nothing to control with --skip-train; leave one of them out",
    )
