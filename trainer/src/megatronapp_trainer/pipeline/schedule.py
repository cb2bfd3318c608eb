"""The interface of a pipeline schedule."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatronapp_common.names import ExitCode
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.hooks.step_observer import StepObserver
from megatronapp_trainer.models.registry import ModelFamily
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.parallel.transport import Transport
from megatronapp_trainer.pipeline.planning.report import PlanReport


class PipelineSchedule(Protocol):
    """Runs the forward and backward passes of a step on this rank, in the order that it chooses.

    It announces each pass of a training step to the observer as the pass begins and ends: FORWARD, BACKWARD and
    WEIGHT with their chunk and microbatch. No order is known to the observer before the step.
    """

    def train(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run forward and backward of all microbatches and reduce the gradients.

        Returns the reports of the loss by microbatch on the last stage; on other stages an empty list.
        """

    def evaluate(self, feed: StepFeed, num_microbatches: int) -> list[torch.Tensor]:
        """Run the forward passes alone, with no gradients and no spans."""

    def close(self, code: ExitCode = ExitCode.OK) -> None:
        """Free what the schedule shares with other ranks; training has ended, with `code` on this rank."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleContext:
    """The parts of a run that a schedule works with."""

    config: TrainerConfig
    layout: Layout
    core_config: Any
    """megatron-core's TransformerConfig."""
    chunks: list[Any]
    """Model chunks of this rank, each in megatron-core's DistributedDataParallel."""
    optimizer: Any
    """megatron-core's, which scales the loss; None on a rank that only runs forward passes."""
    family: ModelFamily
    transport: Transport | None
    """For training steps, with the spans of an observer; None: there is one stage."""
    evaluation_transport: Transport | None
    """Transport of evaluations, without spans; None: there is one stage."""
    observer: StepObserver | None
    report: Callable[[str], None] | None = None
    """Takes a line of text for the log; None on ranks that do not report."""
    publish_plan: Callable[[PlanReport], None] | None = None
    """Takes the plan of the steps that follow; None on ranks that do not report."""


ScheduleBuilder = Callable[[ScheduleContext], PipelineSchedule]
