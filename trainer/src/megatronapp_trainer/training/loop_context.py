"""Parts of the training loop that steps and evaluations share."""

import dataclasses

from megatronapp_trainer.data.microbatches import MicrobatchSource
from megatronapp_trainer.pipeline.schedule import PipelineSchedule
from megatronapp_trainer.training.build import TrainingRun
from megatronapp_trainer.training.monitor import TrainingMonitor
from megatronapp_trainer.training.signals import StopRequest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopContext:
    """A run and what every pass over its data needs."""

    run: TrainingRun
    schedule: PipelineSchedule
    source: MicrobatchSource
    monitor: TrainingMonitor
    stop_request: StopRequest
