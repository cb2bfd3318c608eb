"""The choice whether the passes of a run are replayed, and what records them."""

import logging

import torch

from megatronapp_trainer.config.rules.graphs import reasons_against_graphs, uses_slots
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.hooks.step_observer import PassCollectives
from megatronapp_trainer.pipeline.graphs.recorders import GraphRecorders, PassRecorders
from megatronapp_trainer.pipeline.schedule import ScheduleContext

log = logging.getLogger(__name__)


def recorders_of(device: torch.device, collectives: PassCollectives | None) -> PassRecorders | None:
    """Return what records passes on a device, cut at their first collective if these are observed; None: nothing."""
    return GraphRecorders(device, collectives) if device.type == "cuda" else None


def pass_recorders(context: ScheduleContext) -> PassRecorders | None:
    """Return what records the passes of this run; None if they are not replayed. The choice is logged.

    Raises UsageError if graphs are asked for on a device that has none.
    """
    config = context.config
    collectives = None if context.observer is None else context.observer.collectives
    recorders = recorders_of(next(context.chunks[0].parameters()).device, collectives)
    if recorders is None:
        if config.kernels.cuda_graph_impl == "local":
            raise UsageError("--cuda-graph-impl local needs a GPU; leave it out here")
        return None
    reasons = reasons_against_graphs(config)
    if reasons:
        log.info("CUDA graphs: off, because of %s", ", ".join(reasons))
        return None
    how = ", in slots of the microbatches in flight" if uses_slots(config) else ""
    log.info("CUDA graphs: passes are replayed from the second step on%s", how)
    return recorders
