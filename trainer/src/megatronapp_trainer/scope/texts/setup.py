"""Construction of the runs of probe texts on each rank of a training."""

import os
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from megatronapp_common.names import Env
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.config.batch_size import BatchSchedule
from megatronapp_trainer.parallel.layout import Layout
from megatronapp_trainer.scope.texts.text_capture import TextCapture
from megatronapp_trainer.scope.texts.text_hooks import Place, TextHooks
from megatronapp_trainer.scope.texts.token_texts import Rounds, count_texts, read_texts
from megatronapp_trainer.scope.transfer.publisher import FrameJob


def rounds_of(config: TrainerConfig, layout: Layout, batches: BatchSchedule) -> Rounds:
    """Return the division of the texts into rounds, the same on all ranks. Raises UsageError."""
    return Rounds.of(
        count_texts(config),
        micro_batch_size=batches.micro_batch_size,
        usual=batches.final // (batches.micro_batch_size * batches.data_size),
        multiple=layout.pipeline_size if layout.virtual_size > 1 else 1,
    )


def open_texts(
    config: TrainerConfig,
    layout: Layout,
    chunks: list[Any],
    core_config: Any,  # noqa: ANN401 - TransformerConfig
    *,
    rounds: Rounds,
    vocab_size: int,
    device: torch.device,
    send: Callable[[FrameJob], None],
) -> TextCapture:
    """Prepare a rank that runs forward passes; ranks of the first replica capture them.

    Raises UsageError or DataError.
    """
    texts, tokenizer = read_texts(config)
    hooks = None
    if layout.data_rank == 0:
        place = Place(
            tensor_rank=layout.tensor_rank,
            tensor_size=layout.tensor_size,
            sequence_parallel=config.parallel.sequence_parallel,
            vocab_size=vocab_size,
            tensor_group=parallel_state.get_tensor_model_parallel_group(),
        )
        hooks = TextHooks(chunks, core_config, place, [text.tokens for text in texts])
    return TextCapture(
        config,
        texts,
        rounds,
        hooks,
        header={"rank": layout.global_rank, "attempt": int(os.environ.get(Env.ATTEMPT, "0"))},
        decode=lambda token: tokenizer.detokenize([token]),
        send=send,
        device=device,
    )
