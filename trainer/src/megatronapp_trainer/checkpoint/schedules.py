"""Whether the schedules of a checkpoint are those of this run, asked before megatron-core's scheduler asserts it.

The scheduler counts samples; people write iterations, so both sides are told in iterations of their own global batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatronapp_trainer.config import OptimizerConfig, TrainerConfig

State = Mapping[str, float | str]
"""What ``OptimizerParamScheduler.state_dict()`` gives."""

_ADVICE = (
    "give the checkpoint's values; or --override-opt_param-scheduler to go on with this run's (extended or shortened "
    "training); or --use-checkpoint-opt_param-scheduler to keep the checkpoint's, whatever the flags say "
    "(in a manifest: spec.args: [--override-opt_param-scheduler])"
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A value that the scheduler compares, and who sets it. `samples`: counted in samples."""

    key: str
    flag: str
    field: str
    samples: bool = False


def conflict(there: State, here: State, *, train_iters_there: int, config: TrainerConfig) -> str | None:
    """Why the checkpoint's schedules cannot be gone on with, or None.

    `there` and `here` are the scheduler's state in the checkpoint and in this run; `train_iters_there` is the
    checkpoint's --train-iters, which tells its global batch.
    """
    ours = config.optimizer
    if ours.override_opt_param_scheduler or ours.use_checkpoint_opt_param_scheduler:
        return None
    batches = _batch(there, train_iters_there), _batch(here, config.training.train_iters)
    different = [entry for entry in _entries(ours) if entry.key in there and there[entry.key] != here[entry.key]]
    if not different:
        return None
    words = ", ".join(_words(different, there, here, batches))
    return f"this run's schedules differ from the checkpoint's in {words}; {_ADVICE}"


def _entries(ours: OptimizerConfig) -> tuple[_Entry, ...]:
    warmup = (
        ("--lr-warmup-iters", "lrWarmupIters")
        if ours.lr_warmup_fraction is None
        else ("--lr-warmup-fraction", "lrWarmupFraction")
    )
    growing = ours.start_weight_decay is not None
    return (
        _Entry("wd_incr_steps", "--train-iters", "trainIters", samples=True),
        _Entry("lr_decay_steps", "--lr-decay-iters", "lrDecayIters, left out: trainIters", samples=True),
        _Entry("lr_warmup_steps", *warmup, samples=True),
        _Entry("max_lr", "--lr", "lr"),
        _Entry("min_lr", "--min-lr", "minLr"),
        _Entry("lr_decay_style", "--lr-decay-style", "lrDecayStyle"),
        _Entry("wd_incr_style", "--weight-decay-incr-style", "weightDecayIncrStyle"),
        _Entry("start_wd", *(("--start-weight-decay", "startWeightDecay") if growing else _WEIGHT_DECAY)),
        _Entry("end_wd", *(("--end-weight-decay", "endWeightDecay") if growing else _WEIGHT_DECAY)),
    )


_WEIGHT_DECAY = ("--weight-decay", "weightDecay")


def _batch(state: State, train_iters: int) -> float:
    """Samples of one iteration: the weight decay's schedule is always as long as the training."""
    return float(state["wd_incr_steps"]) / train_iters


def _words(different: list[_Entry], there: State, here: State, batches: tuple[float, float]) -> Iterator[str]:
    """One piece per flag; start and end of a constant weight decay are one."""
    if batches[0] != batches[1] and any(entry.samples for entry in different):
        yield _piece("--global-batch-size", "globalBatchSize", f"{batches[0]:g}", f"{batches[1]:g}")
    told = set()
    for entry in different:
        values = [_show(entry, state[entry.key], batch) for state, batch in zip((there, here), batches, strict=True)]
        if values[0] != values[1] and entry.flag not in told:
            told.add(entry.flag)
            yield _piece(entry.flag, entry.field, *values)


def _piece(flag: str, field: str, there: str, here: str) -> str:
    return f"{flag} (spec.training.{field}): {there} there, {here} here"


def _show(entry: _Entry, value: float | str, batch: float) -> str:
    if not entry.samples:
        return str(value)
    return f"{round(float(value) / batch, 6):.12g} iterations"
