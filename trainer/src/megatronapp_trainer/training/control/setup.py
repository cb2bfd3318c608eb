"""Construction of the control of a training on each of its ranks."""

import datetime
import os
import pathlib
from collections.abc import Callable

import torch

from megatronapp_common.control.orders import PAUSED, RUNNING
from megatronapp_common.names import DEFAULT_SHM_DIR, Env, ShmFile
from megatronapp_common.shared_documents import DocumentReader
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.device import Device
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.hooks.step_observer import StepObserver
from megatronapp_trainer.hooks.training_capture import TrainingCapture
from megatronapp_trainer.hooks.training_perturbation import TrainingPerturbation
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.parallel.worlds import control_store
from megatronapp_trainer.training.control.group import ControlGroup
from megatronapp_trainer.training.control.order_reader import OrderReader
from megatronapp_trainer.training.control.report import ControlReport
from megatronapp_trainer.training.control.training_control import TrainingControl


class RankSurroundings:
    """`ControlSurroundings` of a rank."""

    def __init__(
        self,
        device: Device,
        *,
        stop_requested: Callable[[], bool],
        announce: Callable[[], None] | None = None,
        publish: Callable[[ControlReport], None] | None = None,
    ) -> None:
        self._device = device
        self._stop_requested = stop_requested
        self._announce = announce
        self._publish = publish

    def announce(self) -> None:
        """Call the forward ranks of this backward rank to the boundary."""
        if self._announce is not None:
            self._announce()

    def stop_requested(self) -> bool:
        """Return whether a signal has asked this rank to stop."""
        return self._stop_requested()

    def settle(self) -> None:
        """Wait for the device, so that none of its kernels waits for another rank during a pause."""
        if self._device.is_cuda:
            torch.cuda.synchronize(self._device.torch_device)

    def publish(self, report: ControlReport) -> None:
        """Write the state into the progress document, on the reporting rank."""
        if self._publish is not None:
            self._publish(report)


def open_control(
    config: TrainerConfig,
    layout: Layout,
    surroundings: RankSurroundings,
    observer: StepObserver | None,
    *,
    capture: TrainingCapture | None = None,
    perturbation: TrainingPerturbation | None = None,
) -> TrainingControl:
    """Connect this rank to the control of the training; collective over all ranks of the job.

    Raises UsageError for a start in a pause that no client can end.
    """
    unattended = config.control.starts_paused and config.control.training_resume_after is None
    if unattended and not os.environ.get(Env.HUB_URL):
        raise UsageError(
            "--training-start-paused: no hub gives orders to this training, so that it would never begin; start it by "
            "megatronapp run with spec.analyzer.enabled: true, or leave the flag out"
        )
    timeout = datetime.timedelta(minutes=config.parallel.distributed_timeout_minutes)
    group = ControlGroup(control_store(), layout.global_rank, layout.global_world_size, timeout)
    return TrainingControl(
        group,
        _open_reader() if layout.global_rank == 0 else None,
        surroundings,
        state=PAUSED if config.control.starts_paused else RUNNING,
        saves=config.checkpoint.save is not None,
        resume_after_s=config.control.training_resume_after,
        observer=observer,
        capture=capture,
        perturbation=perturbation,
    )


def _open_reader() -> OrderReader:
    directory = os.environ.get(Env.SHM_DIR, DEFAULT_SHM_DIR)
    prefix = os.environ.get(Env.SHM_PREFIX) or f"megatronapp-{os.getpid()}"
    document = DocumentReader(pathlib.Path(directory) / f"{prefix}.{ShmFile.CONTROL}")
    return OrderReader(document, attempt=int(os.environ.get(Env.ATTEMPT, "0")))
