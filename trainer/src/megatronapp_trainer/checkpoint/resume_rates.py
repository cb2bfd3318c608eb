"""Comparison of a checkpoint's schedules and rates with those of this run, and the choice of a resumed run.

The scheduler counts samples; users write iterations, so both sides are shown in iterations of their own global batch
where that is constant.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatronapp_trainer.checkpoint.train_state import TrainState
from megatronapp_trainer.config import OptimizerConfig, TrainerConfig

State = Mapping[str, float | str | None]
"""Values that `state_of` returns."""

_ADVICE = (
    "give the checkpoint's values; or --override-opt_param-scheduler to continue with this run's (extended or "
    "shortened training, other rates); or --use-checkpoint-opt_param-scheduler to keep the checkpoint's "
    "(in a manifest: spec.args: [--override-opt_param-scheduler])"
)

_COUNTED_IN_FULL = (
    "the release that wrote it took the steps of --rampup-batch-size for full ones when it counted samples, which "
    "--use-checkpoint-opt_param-scheduler continues with; "
)


@dataclass(frozen=True, slots=True)
class _ComparedSetting:
    """A value that is compared, and the flag that sets it. `samples`: counted in samples."""

    key: str
    flag: str
    field: str | None
    samples: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroupSettings:
    """Settings of the optimizer's parameter groups by the flags, remembered before a checkpoint is loaded."""

    settings: tuple[dict[str, Any], ...]


_OF_ADAM = ("betas", "eps")
_NOT_SETTINGS = ("params", "lr", "weight_decay", "step")
"""Keys of a parameter group that the schedules or the steps set."""


def state_of(state: TrainState) -> dict[str, float | str | None]:
    """Return all rates and schedules of a run: megatron-core's scheduler, and what its state lacks."""
    scheduler, groups = state.scheduler, state.optimizer.param_groups
    values: dict[str, float | str | None] = {
        **scheduler.state_dict(),
        "init_lr": scheduler.init_lr,
        "wsd_decay_steps": scheduler.wsd_decay_steps,
        "lr_wsd_decay_style": scheduler.lr_wsd_decay_style,
    }
    if groups:
        (beta1, beta2), eps = groups[0]["betas"], groups[0]["eps"]
        values |= {"adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": eps}
    decoupled = next((group for group in groups if not group["default_config"]), None)
    if decoupled is not None and decoupled["max_lr"] != scheduler.max_lr:
        values["decoupled_lr"] = decoupled["max_lr"]
    if decoupled is not None and decoupled["min_lr"] != scheduler.min_lr:
        values["decoupled_min_lr"] = decoupled["min_lr"]
    return {"decoupled_lr": None, "decoupled_min_lr": None} | values


def remember_groups(state: TrainState) -> ParameterGroupSettings:
    """Return the present settings of all parameter groups."""
    groups = state.optimizer.param_groups
    return ParameterGroupSettings(
        settings=tuple({name: group[name] for name in group if name not in _NOT_SETTINGS} for group in groups)
    )


def decoupled_groups(optimizer: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - state, nested by kind of parameters
    """Yield the parameter groups of --decoupled-lr in an optimizer's stored state."""
    if not isinstance(optimizer, dict):
        return
    yield from (group for group in optimizer.get("param_groups", ()) if not group.get("default_config", True))
    for part in optimizer.values():
        yield from decoupled_groups(part)


def mark_decoupled_groups(optimizer: Any) -> None:  # noqa: ANN401
    """Mark the groups of --decoupled-lr in loaded state, as earlier releases did not.

    megatron-core finds groups by such marks, and would confuse groups that differ in their rates alone.
    """
    for group in decoupled_groups(optimizer):
        group["is_decoupled_lr"] = True


def settle(state: TrainState, groups: ParameterGroupSettings, there: State, ours: OptimizerConfig) -> None:
    """Give scheduler and parameter groups the values of the flags, or with the flag for it those of the checkpoint.

    Must be called after megatron-core has loaded both: it leaves the groups with the rates of the checkpoint in any
    case, and those of `--decoupled-lr` with the rates of any group.
    """
    keep, scheduler = ours.use_checkpoint_opt_param_scheduler, state.scheduler
    if keep:
        _keep_schedule(scheduler, there)
    for group, own in zip(state.optimizer.param_groups, groups.settings, strict=True):
        loaded = {name: group[name] for name in _OF_ADAM if name in group}
        rates = group.get("max_lr"), group.get("min_lr")
        group.update(own)
        if keep:
            group.update(loaded)
            group["max_lr"], group["min_lr"] = _checkpoint_rates(scheduler, there, own, rates)
    scheduler.step(0)


def _keep_schedule(scheduler: Any, there: State) -> None:  # noqa: ANN401 - OptimizerParamScheduler
    """Restore what megatron-core's scheduler does not take from a checkpoint. Older checkpoints lack it."""
    scheduler.init_lr = there.get("init_lr", scheduler.init_lr)
    scheduler.wsd_decay_steps = there.get("wsd_decay_steps", scheduler.wsd_decay_steps)
    scheduler.lr_wsd_decay_style = there.get("lr_wsd_decay_style", scheduler.lr_wsd_decay_style)


def _checkpoint_rates(scheduler: Any, there: State, own: Mapping[str, Any], loaded: tuple[Any, Any]) -> tuple[Any, Any]:  # noqa: ANN401
    """Return largest and smallest rate of a group under the checkpoint's schedules; `loaded` are those of its group
    there.
    """
    if own["default_config"]:
        return scheduler.max_lr, scheduler.min_lr
    if "decoupled_lr" not in there:  # an earlier release wrote it
        return loaded
    decoupled = there.get("decoupled_lr"), there.get("decoupled_min_lr")
    return (
        scheduler.max_lr if decoupled[0] is None else decoupled[0],
        scheduler.min_lr if decoupled[1] is None else decoupled[1],
    )


def conflict(
    there: State, here: State, *, arguments_there: Mapping[str, Any], config: TrainerConfig, optimizer: bool
) -> str | None:
    """Return why the checkpoint's schedules and rates cannot be resumed with, or None.

    `there` and `here` are the values of `state_of` in the checkpoint and in this run; `arguments_there` are those of
    the checkpoint's manifest; `optimizer`: its state is read too.
    """
    ours = config.optimizer
    if ours.override_opt_param_scheduler or ours.use_checkpoint_opt_param_scheduler:
        return None
    entries = _entries(config) + (_ADAM if optimizer else ())
    different = [entry for entry in entries if entry.key in there and there[entry.key] != here.get(entry.key)]
    if not different:
        return None
    batches = _batch(there, arguments_there), _batch(here, _lengths(config))
    flags = ", ".join(_describe_flags(different, there, here, batches))
    why = _COUNTED_IN_FULL if counted_in_full(arguments_there, config) else ""
    return f"this run's schedules differ from the checkpoint's in {flags}; {why}{_ADVICE}"


def counted_in_full(arguments_there: Mapping[str, Any], config: TrainerConfig) -> bool:
    """Return True if the checkpoint's release counted the samples of a ramp-up's steps with the final batch size.

    It did not store --rampup-batch-size, which must be given again.
    """
    ours = config.training
    ramp_up = ours.rampup_batch_size is not None and ours.train_samples is None
    return ramp_up and "--train-samples" not in arguments_there


_ADAM = (
    _ComparedSetting("adam_beta1", "--adam-beta1", "adamBeta1"),
    _ComparedSetting("adam_beta2", "--adam-beta2", "adamBeta2"),
    _ComparedSetting("adam_eps", "--adam-eps", "adamEps"),
)


def _entries(config: TrainerConfig) -> tuple[_ComparedSetting, ...]:
    ours = config.optimizer
    growing = ours.start_weight_decay is not None
    return (
        *(_SAMPLES if config.training.train_samples is not None else _ITERATIONS),
        _ComparedSetting("lr_warmup_steps", *_warmup(config), samples=True),
        _ComparedSetting("max_lr", "--lr", "lr"),
        _ComparedSetting("min_lr", "--min-lr", "minLr"),
        _ComparedSetting("init_lr", "--lr-warmup-init", None),
        _ComparedSetting("decoupled_lr", "--decoupled-lr", None),
        _ComparedSetting("decoupled_min_lr", "--decoupled-min-lr", None),
        _ComparedSetting("lr_decay_style", "--lr-decay-style", "lrDecayStyle"),
        *(
            (_ComparedSetting("lr_wsd_decay_style", "--lr-wsd-decay-style", "lrWsdDecayStyle"),)
            * (ours.lr_decay_style == "WSD")
        ),
        _ComparedSetting("wd_incr_style", "--weight-decay-incr-style", "weightDecayIncrStyle"),
        _ComparedSetting("start_wd", *(("--start-weight-decay", "startWeightDecay") if growing else _WEIGHT_DECAY)),
        _ComparedSetting("end_wd", *(("--end-weight-decay", "endWeightDecay") if growing else _WEIGHT_DECAY)),
    )


_ITERATIONS = (
    _ComparedSetting("wd_incr_steps", "--train-iters", "trainIters", samples=True),
    _ComparedSetting("lr_decay_steps", "--lr-decay-iters", "lrDecayIters, by default trainIters", samples=True),
    _ComparedSetting("wsd_decay_steps", "--lr-wsd-decay-iters", "lrWsdDecayIters", samples=True),
)
_SAMPLES = (
    _ComparedSetting("wd_incr_steps", "--train-samples", None, samples=True),
    _ComparedSetting("lr_decay_steps", "--lr-decay-samples", None, samples=True),
    _ComparedSetting("wsd_decay_steps", "--lr-wsd-decay-samples", None, samples=True),
)
_WEIGHT_DECAY = ("--weight-decay", "weightDecay")


def _warmup(config: TrainerConfig) -> tuple[str, str | None]:
    if config.optimizer.lr_warmup_fraction is not None:
        return "--lr-warmup-fraction", "lrWarmupFraction"
    if config.training.train_samples is not None:
        return "--lr-warmup-samples", None
    return "--lr-warmup-iters", "lrWarmupIters"


def _lengths(config: TrainerConfig) -> dict[str, Any]:
    training = config.training
    return {
        "--train-iters": training.train_iters,
        "--train-samples": training.train_samples,
        "--rampup-batch-size": training.rampup_batch_size,
    }


def _batch(state: State, arguments: Mapping[str, Any]) -> float | None:
    """Return the samples of one iteration, None where they change or lengths are given in samples.

    The weight decay's schedule is always as long as the training.
    """
    if arguments.get("--train-samples") is not None or arguments.get("--rampup-batch-size") is not None:
        return None
    return float(state["wd_incr_steps"] or 0) / float(arguments["--train-iters"])


def _describe_flags(
    different: list[_ComparedSetting], there: State, here: State, batches: tuple[float | None, float | None]
) -> Iterator[str]:
    """Yield one phrase per flag; start and end of a constant weight decay are one flag."""
    comparable = None not in batches
    if comparable and batches[0] != batches[1] and any(entry.samples for entry in different):
        yield _describe_difference("--global-batch-size", "globalBatchSize", f"{batches[0]:g}", f"{batches[1]:g}")
    shown = set()
    for entry in different:
        values = [
            _show(entry, state[entry.key], batch if comparable else None)
            for state, batch in zip((there, here), batches, strict=True)
        ]
        if values[0] == values[1] and (not comparable or batches[0] == batches[1]):
            values = [f"{state[entry.key]!r} samples" for state in (there, here)]
        if values[0] != values[1] and entry.flag not in shown:
            shown.add(entry.flag)
            yield _describe_difference(entry.flag, entry.field, *values)


def _describe_difference(flag: str, field: str | None, there: str, here: str) -> str:
    place = "" if field is None else f" (spec.training.{field})"
    return f"{flag}{place}: {there} there, {here} here"


def _show(entry: _ComparedSetting, value: float | str | None, batch: float | None) -> str:
    if value is None:
        return "none"
    if not entry.samples:
        return str(value)
    if batch is None:
        return f"{float(value):.12g} samples"
    return f"{round(float(value) / batch, 6):.12g} iterations"
