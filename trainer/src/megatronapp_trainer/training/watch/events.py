"""Figures of a training over its steps: TensorBoard's event files, and a run of Weights & Biases."""

import dataclasses
import json
import logging
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from megatronapp_common.names import Env
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import UsageError

log = logging.getLogger(__name__)


_START_TRIES = 3
"""Requests before a server is given up; by default the package repeats them for many minutes before a step is run."""
_REQUEST_S = 10.0
"""Seconds that a request may take."""
_END_S = 15.0
"""Seconds at the end of a training in which the run's last figures are sent; by default there is no limit."""


class EventWriter(Protocol):
    """Writes figures of steps."""

    def add(self, values: Mapping[str, float], iteration: int) -> None:
        """Add samples of scalars of a step."""

    def close(self) -> None:
        """Write all pending events and close."""


class EventFileWriter:
    """Writes event files by TensorBoard's SummaryWriter."""

    def __init__(self, events: Any) -> None:  # noqa: ANN401 - TensorBoard's
        self._events = events

    def add(self, values: Mapping[str, float], iteration: int) -> None:
        """Add samples of scalars of a step."""
        for tag, value in values.items():
            self._events.add_scalar(tag, value, iteration)

    def close(self) -> None:
        """Write all pending events and close the file."""
        self._events.close()


class WandbWriter:
    """A run of Weights & Biases, by its package `wandb`."""

    def __init__(self, run: Any) -> None:  # noqa: ANN401 - wandb's
        # Steps of its own must grow, and a training that resumes repeats some: the iteration is the axis instead.
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        self._run = run

    def add(self, values: Mapping[str, float], iteration: int) -> None:
        """Add samples of scalars of a step, in one row."""
        self._run.log({**values, "iteration": iteration})

    def close(self) -> None:
        """Send what is pending and end the run, unless an error ends the training, whose exit waits for no server.

        Of such a run the server has all but the last seconds, which the next attempt trains again.
        """
        if sys.exception() is None:
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
                writer.add(values, iteration)
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
    """Open the writers that flags ask for.

    Raises:
        UsageError: one cannot be opened, or its package is missing. A job that has had an attempt before gets a
            warning in place of a run of Weights & Biases that cannot be started.
    """
    writers: dict[str, EventWriter] = {}
    if (directory := config.logging.tensorboard_dir) is not None:
        writers[directory] = _open_tensorboard(directory, config.logging.tensorboard_queue_size)
    if (project := config.logging.wandb_project) is not None:
        try:
            writers[f"the project {project} of Weights & Biases"] = _open_wandb(config, project)
        except UsageError as error:
            if int(os.environ.get(Env.ATTEMPT, "0")) == 0:
                raise
            # The flags were right before: an outage of the server must not end a job that resumes.
            log.warning("no events are written to Weights & Biases in this attempt: %s", error)
    return Events(writers)


def _open_tensorboard(directory: str, most_waiting: int) -> EventWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "--tensorboard-dir needs the package tensorboard; install megatronapp-trainer[tensorboard]"
        ) from error
    try:
        return EventFileWriter(SummaryWriter(directory, max_queue=most_waiting))
    except OSError as error:
        raise UsageError(f"--tensorboard-dir {directory} cannot be written to: {error}") from error


def _open_wandb(config: TrainerConfig, project: str) -> EventWriter:
    """Start a run, or in a worker of a job continue that of its earlier attempts."""
    try:
        from wandb import Settings, init  # by name: a folder "wandb" of earlier runs can be imported, too
    except ImportError as error:
        raise UsageError("--wandb-project needs the package wandb; install megatronapp-trainer[wandb]") from error
    flags, saved = config.logging, config.checkpoint.save
    folder = pathlib.Path(flags.wandb_save_dir or (pathlib.Path(saved, "wandb") if saved else "wandb"))
    uid = os.environ.get(Env.JOB_UID)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        run = init(
            project=project,
            entity=flags.wandb_entity,
            name=flags.wandb_exp_name or os.environ.get(Env.JOB),
            dir=folder,
            id=uid,
            resume="allow" if uid else None,
            config=json.loads(json.dumps(dataclasses.asdict(config), default=str)),
            settings=Settings(
                console="off",
                disable_git=True,
                save_code=False,
                silent=True,
                finish_timeout=_END_S,
                x_graphql_retry_max=_START_TRIES - 1,
                x_graphql_retry_wait_max_seconds=_REQUEST_S,
                x_graphql_timeout_seconds=_REQUEST_S,
            ),
        )
    except Exception as error:  # the package's errors have no class in common
        reason = str(error).rstrip(".")
        raise UsageError(
            f"--wandb-project {project}: no run can be started: {reason}; set WANDB_API_KEY, or WANDB_MODE=offline to "
            f"write it to {folder} alone, for `wandb sync`"
        ) from error
    return WandbWriter(run)
