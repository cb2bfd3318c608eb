"""Messages about a stop that a user requested: while it happens, and its result."""

import pathlib

from megatronapp_common.job import MegatronJob
from megatronapp_common.names import CHECKPOINT_TRACKER
from megatronapp_operator.plan import ConditionType, Phase, Status

INTERRUPTED = "Interrupted"


def was_interrupted(status: Status) -> bool:
    """Return True if the job ended on request: suspended, or failed if its workers did not save."""
    ends = (status.condition(kind) for kind in (ConditionType.FAILED, ConditionType.SUSPENDED))
    return any(condition is not None and condition.status and condition.reason == INTERRUPTED for condition in ends)


def stopping_line(job: MegatronJob) -> str:
    """Return the line that is printed at once when a stop is requested."""
    if job.spec.mode == "serve":
        return "stopping: open requests end with an error; Ctrl-C again kills"
    if _saves(job):
        return "stopping: writing a checkpoint; Ctrl-C again kills"
    return "stopping: nothing is saved, as spec.checkpoint.save is not set; Ctrl-C again kills"


def stopped_line(job: MegatronJob, status: Status) -> str:
    """Return the line for the end: the saved step, and how to continue. Events have reported why workers failed."""
    if job.spec.mode == "serve":
        return "stopped"
    if status.phase is not Phase.SUSPENDED:
        if not _saves(job):
            return "stopped; nothing was saved, as spec.checkpoint.save is not set"
        return f"stopped, but not all workers reported a checkpoint{_newest(job)}"
    if status.attempt_time is None:
        return f"stopped before attempt {status.attempt} began{_newest(job)}"
    save = _folder(job)
    step = None if save is None else _saved_step(save)
    if step is None:
        return "stopped" if save is None else f"stopped before a first checkpoint was written to {save}"
    return f"stopped at step {step}, checkpoint in {save}{_again(job)}"


def _saves(job: MegatronJob) -> bool:
    return _folder(job) is not None or "--save" in (job.spec.args or ())


def _folder(job: MegatronJob) -> pathlib.Path | None:
    save = job.spec.checkpoint.save
    return None if save is None else pathlib.Path(save)


def _newest(job: MegatronJob) -> str:
    """Return which checkpoint of any attempt to continue from; empty if the folder is not known."""
    save = _folder(job)
    if save is None:
        return ""
    step = _saved_step(save)
    if step is None:
        return f"; {save} has no checkpoint"
    return f"; the newest checkpoint in {save} is of step {step}{_again(job)}"


def _again(job: MegatronJob) -> str:
    return "; run the same command to continue" if job.spec.checkpoint.load in (None, job.spec.checkpoint.save) else ""


def _saved_step(folder: pathlib.Path) -> int | None:
    try:
        return int((folder / CHECKPOINT_TRACKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # Megatron also writes the text "release"
        return None
