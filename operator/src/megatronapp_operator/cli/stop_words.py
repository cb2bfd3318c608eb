"""What is said about a stop that somebody asked for: while it is on its way, and what it has left."""

import pathlib

from megatronapp_common.job import MegatronJob
from megatronapp_common.names import ExitCode
from megatronapp_operator.backends.process import files
from megatronapp_operator.backends.process.paths import JobPaths
from megatronapp_operator.plan import ConditionType, Status

INTERRUPTED = "Interrupted"
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's name for the file that holds the step of the newest checkpoint."""


def interrupted(status: Status) -> bool:
    """Whether the job has ended because it was asked to stop: suspended with a checkpoint, or failed without."""
    ends = (status.condition(kind) for kind in (ConditionType.FAILED, ConditionType.SUSPENDED))
    return any(one is not None and one.status and one.reason == INTERRUPTED for one in ends)


def stopping_line(job: MegatronJob) -> str:
    """Said at once when the job is asked to stop."""
    if _saves(job):
        return "stopping: writing a checkpoint; Ctrl-C again kills"
    return "stopping: nothing is saved, as spec.checkpoint.save is not set; Ctrl-C again kills"


def stopped_line(job: MegatronJob, paths: JobPaths, status: Status) -> str:
    """Said at the end: which step is safe, and how to go on."""
    save = _folder(job)
    if not _preempted(job, paths, status.attempt):
        return "stopped, and killed before a checkpoint was written"
    step = None if save is None else _saved_step(save)
    if step is None:
        return "stopped" if save is None else f"stopped before a first checkpoint was written to {save}"
    again = "; run the same command to go on" if job.spec.checkpoint.load in (None, job.spec.checkpoint.save) else ""
    return f"stopped at step {step}, checkpoint in {save}{again}"


def _saves(job: MegatronJob) -> bool:
    return _folder(job) is not None or "--save" in (job.spec.args or ())


def _folder(job: MegatronJob) -> pathlib.Path | None:
    save = job.spec.checkpoint.save
    return None if save is None else pathlib.Path(save)


def _preempted(job: MegatronJob, paths: JobPaths, attempt: int) -> bool:
    """Whether every launcher ended as asked. One that was killed has left no record."""
    records = [files.read_json(paths.run_dir(attempt, index) / "termination.json") for index in range(job.world.nodes)]
    return all(record is not None and record.get("code") == ExitCode.PREEMPTED for record in records)


def _saved_step(folder: pathlib.Path) -> int | None:
    try:
        return int((folder / TRACKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # Megatron also writes the word "release"
        return None
