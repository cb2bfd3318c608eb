"""Parts of the training loop that steps and evaluations share."""

import dataclasses
from typing import TYPE_CHECKING

from megatronapp_trainer.data.microbatches import MicrobatchSource
from megatronapp_trainer.pipeline.schedule import PipelineSchedule
from megatronapp_trainer.training.build import TrainingRun
from megatronapp_trainer.training.monitor import TrainingMonitor
from megatronapp_trainer.training.signals import StopRequest

if TYPE_CHECKING:  # imported only where checkpoints are written
    from megatronapp_trainer.checkpoint.memory.saves import MemorySaves
    from megatronapp_trainer.checkpoint.saving.background import BackgroundSaves


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopContext:
    """A run and what every pass over its data needs."""

    run: TrainingRun
    schedule: PipelineSchedule
    source: MicrobatchSource
    monitor: TrainingMonitor
    stop_request: StopRequest
    saves: "BackgroundSaves | None" = None
    """Checkpoints that are written while training continues."""
    memory: "MemorySaves | None" = None
    """Saves of the state in the memory of the workers."""

    def wait_for_copies(self) -> None:
        """Let a checkpoint be copied before weights or optimizer change."""
        if self.saves is not None:
            self.saves.before_change()
        if self.memory is not None:
            self.memory.before_change()
