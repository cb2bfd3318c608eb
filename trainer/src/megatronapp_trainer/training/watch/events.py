"""Figures of a training over its steps: TensorBoard's event files, and a run of Weights & Biases."""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from megatronapp_common.names import Env
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import UsageError

log = logging.getLogger(__name__)


class EventWriter(Protocol):
    """Methods used of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add a sample of a scalar."""

    def close(self) -> None:
        """Write all pending events and close."""


class WandbWriter:
    """A run of Weights & Biases, by its package `wandb`."""

    def __init__(self, run: Any) -> None:  # noqa: ANN401 - wandb's
        # Steps of its own must grow, and a training that resumes repeats some: the iteration is the axis instead.
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        self._run = run

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Add a sample of a scalar."""
        self._run.log({tag: value, "iteration": step})

    def close(self) -> None:
        """Send what is pending and end the run."""
        self._run.finish()


class Events:
    """The writers of a training's figures. One that fails (a full disk, say) is given up, the training continues."""

    def __init__(self, writers: Mapping[str, EventWriter]) -> None:
        """Take writers by what they write to, for the log."""
        self._writers = dict(writers)

    def add(self, values: Mapping[str, float], iteration: int) -> None:
        """Add samples of scalars of a step."""
        for place, writer in list(self._writers.items()):
            try:
                for tag, value in values.items():
                    writer.add_scalar(tag, value, iteration)
            except Exception as error:  # the writers' threads forward any error
                self._give_up(place, error)

    def close(self) -> None:
        """Write what is pending and close all writers."""
        for place, writer in list(self._writers.items()):
            try:
                writer.close()
            except Exception as error:
                self._give_up(place, error)

    def _give_up(self, place: str, error: Exception) -> None:
        del self._writers[place]
        log.warning("no more events are written to %s: %s", place, error)


def open_events(config: TrainerConfig) -> Events:
    """Open the writers that flags ask for. Raises UsageError where one cannot be opened, or its package is missing."""
    writers: dict[str, EventWriter] = {}
    if (directory := config.logging.tensorboard_dir) is not None:
        writers[directory] = _open_tensorboard(directory)
    if (project := config.logging.wandb_project) is not None:
        writers[f"the project {project} of Weights & Biases"] = _open_wandb(config, project)
    return Events(writers)


def _open_tensorboard(directory: str) -> EventWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "--tensorboard-dir needs the package tensorboard; install megatronapp-trainer[tensorboard]"
        ) from error
    try:
        events: EventWriter = SummaryWriter(directory)
    except OSError as error:
        raise UsageError(f"--tensorboard-dir {directory} cannot be written to: {error}") from error
    return events


def _open_wandb(config: TrainerConfig, project: str) -> EventWriter:
    """Start a run, or in a worker of a job continue that of its earlier attempts."""
    try:
        import wandb
    except ImportError as error:
        raise UsageError("--wandb-project needs the package wandb; install megatronapp-trainer[wandb]") from error
    flags, saved = config.logging, config.checkpoint.save
    folder = pathlib.Path(flags.wandb_save_dir or (pathlib.Path(saved, "wandb") if saved else "wandb"))
    uid = os.environ.get(Env.JOB_UID)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=project,
            entity=flags.wandb_entity,
            name=flags.wandb_exp_name or os.environ.get(Env.JOB),
            dir=folder,
            id=uid,
            resume="allow" if uid else None,
            config=json.loads(json.dumps(dataclasses.asdict(config), default=str)),
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, silent=True),
        )
    except (OSError, wandb.errors.Error) as error:
        raise UsageError(
            f"--wandb-project {project}: no run can be started: {error}; set WANDB_API_KEY, or WANDB_MODE=offline to "
            f"write it to {folder} alone, for `wandb sync`"
        ) from error
    return WandbWriter(run)
