"""Runs of probe texts between two steps, without effects on training."""

from megatronapp_common.trace import RecordKind
from megatronapp_trainer.data.microbatches import StepFeed
from megatronapp_trainer.hooks.probe_texts import ProbeTexts
from megatronapp_trainer.training.evaluate import untouched_training
from megatronapp_trainer.training.loop_context import LoopContext


def read_probe_texts(context: LoopContext, probes: ProbeTexts, step: int, perturbation: str | None) -> None:
    """Run the texts through the weights after `step` steps; collective over all ranks of the job.

    `perturbation`: digest of the recipe that was in force in the newest step.
    """
    reading = probes.reading(step, perturbation=perturbation)
    with context.monitor.span(RecordKind.EVALUATE), untouched_training(context.run), reading:
        iterator = probes.iterator()
        for _ in range(probes.rounds):
            feed = StepFeed(context.source, iterator, probes.microbatches, observer=None)
            context.schedule.evaluate(feed, probes.microbatches)
