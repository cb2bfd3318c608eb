"""Windows of steps for a profiler: torch's own, or one that waits for CUDA's start, such as Nsight Systems."""

import logging
import os
import pathlib
from typing import Any

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import UsageError

log = logging.getLogger(__name__)


class ProfileWindow:
    """Profiles the steps from `--profile-step-start` up to, and without, `--profile-step-end` on this rank."""

    def __init__(self, config: TrainerConfig, rank: int, *, is_cuda: bool) -> None:
        """Take a rank that is profiled."""
        watch = config.watch
        self._first, self._end = watch.profile_step_start, watch.profile_step_end
        self._directory = None
        if watch.use_pytorch_profiler:
            self._directory = pathlib.Path(watch.profile_dir or config.logging.tensorboard_dir or ".")
        self._rank, self._is_cuda = rank, is_cuda
        self._profiler: Any = None
        self._is_open = False

    def step_begin(self, step: int) -> None:
        """Begin before the first step of the window; steps count from 0."""
        if step != self._first:
            return
        self._is_open = True
        if self._directory is None:
            torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call] # of torch
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()

    def step_end(self, steps: int) -> None:
        """End after the last step of the window; `steps`: those that are done."""
        if self._is_open and steps >= self._end:
            self.close()

    def close(self) -> None:
        """End the window early, if it is open, and write what was recorded."""
        if not self._is_open:
            return
        self._is_open = False
        if self._directory is None:
            torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call] # of torch
            return
        self._profiler.stop()
        path = self._directory / f"rank{self._rank}.step{self._first}.pt.trace.json"
        try:
            os.makedirs(self._directory, exist_ok=True)
            self._profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # the training goes on without the file
            log.warning("the profile cannot be written to %s: %s", path, error)
        else:
            log.info("the profile of steps %d to %d is in %s", self._first, self._end - 1, path)
        self._profiler = None


def profile_window(config: TrainerConfig, rank: int, *, is_cuda: bool) -> ProfileWindow | None:
    """Return the window of this rank; None if it is not profiled.

    Raises UsageError, on all ranks, without a GPU where only a GPU can be profiled.
    """
    if config.watch.profile and not config.watch.use_pytorch_profiler and not is_cuda:
        raise UsageError("--profile needs a GPU, or --use-pytorch-profiler, which profiles CPUs, too")
    if not config.watch.profile or rank not in config.watch.profile_ranks:
        return None
    return ProfileWindow(config, rank, is_cuda=is_cuda)
