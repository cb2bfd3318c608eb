"""Construction of the captures of a training on each of its ranks."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import Env
from megatronapp_common.scope.protocol import SOCKET
from megatronapp_common.topology import RankRole
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.scope.statistics.layer_capture import LayerCapture
from megatronapp_trainer.scope.statistics.parameters import LayerParameters
from megatronapp_trainer.scope.statistics.site_hooks import SiteHooks
from megatronapp_trainer.scope.transfer.publisher import FramePublisher


def open_capture(
    config: TrainerConfig,
    layout: Layout,
    chunks: list[Any],
    device: torch.device,
    *,
    every: int,
    loss_scale: Callable[[], float],
) -> LayerCapture:
    """Connect a rank that captures steps, and announce their interval; `loss_scale` as in `LayerParameters`.

    Raises UsageError where no agent passes its frames on.
    """
    folder = os.environ.get(Env.RUN_DIR)
    if not folder or not os.environ.get(Env.HUB_URL):
        raise UsageError(
            "--scope-capture-interval: no hub takes the captures of this training; start it by megatronapp run with "
            "spec.analyzer.enabled: true, or leave the flag out"
        )
    attempt = int(os.environ.get(Env.ATTEMPT, "0"))
    header = {"rank": layout.global_rank, "ranks": layout.global_world_size, "attempt": attempt}
    hello = Frame(FrameType.TRAINING_RANK, {**header, "every": every})
    publisher = FramePublisher(pathlib.Path(folder) / SOCKET, hello)
    publisher.start()
    forwards, backwards = layout.role is not RankRole.BACKWARD, layout.role.has_optimizer
    sites = parameters = None
    if forwards:
        parallel = config.parallel
        sites = SiteHooks(chunks, tensor_rank=layout.tensor_rank, sequence_parallel=parallel.sequence_parallel)
    if backwards:
        parameters = LayerParameters(chunks, tensor_rank=layout.tensor_rank, loss_scale=loss_scale)
    return LayerCapture(
        header,
        publisher.post,
        device,
        sites=sites,
        parameters=parameters,
        end=publisher.close,
    )
