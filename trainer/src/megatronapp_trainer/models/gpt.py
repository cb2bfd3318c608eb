"""The GPT model: one model chunk per virtual stage, its inputs and its loss."""

from typing import Any

import torch

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.microbatches import BatchSource, DataIterators, HostMicrobatch, Microbatch
from megatronapp_trainer.data.request import source_names
from megatronapp_trainer.device import Device
from megatronapp_trainer.hooks.step_observer import LM_LOSS
from megatronapp_trainer.models.chunks import build_wrapped_chunks
from megatronapp_trainer.models.core_config import transformer_config
from megatronapp_trainer.models.initial import initialize_weights
from megatronapp_trainer.models.kernels.choice import FusedParts, fused_parts
from megatronapp_trainer.models.language_model_loss import losses_by_source, token_loss
from megatronapp_trainer.models.layers import block_spec, implementation_of
from megatronapp_trainer.models.packed_documents import document_bounds, document_mask
from megatronapp_trainer.parallel.groups import chunk_groups
from megatronapp_trainer.parallel.layout import Layout

LOSSES: tuple[str, ...] = (LM_LOSS,)
_PLAIN = FusedParts()


def build_chunks(
    config: TrainerConfig, layout: Layout, device: Device, *, vocab_size: int, drawn: bool = True
) -> tuple[Any, list[Any]]:
    """Return TransformerConfig and the model chunks of this rank, as `build_wrapped_chunks`.

    `drawn`: with initial weights; if false, with uninitialised memory, for a checkpoint to fill.
    """
    parts = fused_parts(config, device, implementation_of(config))

    def build(core_config: Any, chunk: int, padded: int) -> Any:  # noqa: ANN401 - untyped library
        return _build_chunk(config, core_config, layout, chunk, padded, drawn=drawn, parts=parts)

    return build_wrapped_chunks(config, layout, device, build, vocab_size=vocab_size)


def build_stage(
    config: TrainerConfig,
    layout: Layout,
    device: Device,
    *,
    vocab_size: int,
    drawn: bool = True,
) -> Any:  # noqa: ANN401 - GPTModel
    """Build a pipeline stage's model without the wrappers of training, in the precision of the configuration.

    `drawn`: with initial weights; if false, with uninitialised memory, for a checkpoint to fill.
    """
    padded = config.model.padded_vocab_size(vocab_size)
    model = _build_chunk(config, transformer_config(config, device), layout, 0, padded, drawn=drawn)
    return model.to(device.torch_device, config.precision.dtype)


def forward(model: Any, batch: Microbatch | None) -> torch.Tensor:  # noqa: ANN401 - DDP
    """Run one chunk with its inputs of a microbatch; None: the chunk reads no data."""
    output: torch.Tensor
    if batch is None:
        output = model(None, None, None)
    else:
        output = model(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels)
    return output


def loss(output: torch.Tensor, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum the loss of each token, which the last chunk puts out, over the unmasked tokens of a microbatch.

    Ranks that share samples each report their own tokens. Gradients are averaged over these ranks, too, so that each
    counts the tokens of whole samples, and its own as often as there are ranks.
    """
    total, tokens, report = token_loss(output, batch.loss_mask, batch.loss_tokens)
    if batch.sources is not None:
        report = torch.cat((report, losses_by_source(output, batch.loss_mask, batch.sources)))
    if batch.context_size > 1:
        return total * batch.context_size, batch.sample_tokens.to(torch.int), report
    return total, tokens, report


def example_batch(config: TrainerConfig, layout: Layout, device: Device) -> Microbatch:
    """Return a microbatch of the form of all others, whose contents mean nothing; collective over the tensor group."""
    size = config.training.micro_batch_size, config.model.seq_length
    zeros = torch.zeros(size, dtype=torch.int64)
    batch = HostMicrobatch(
        tokens=zeros, labels=zeros, loss_mask=torch.ones(size), position_ids=torch.arange(size[1]).expand(size)
    )
    if config.logging.log_loss_per_source:
        batch["source"] = zeros[:, 0]
    return batch_source(config, layout, device).read(iter([batch]), 1)[0]


def batch_source(config: TrainerConfig, layout: Layout, device: Device) -> BatchSource:
    """Return the source that turns host batches into microbatches on this rank's device."""

    def mask(positions_BS: torch.Tensor) -> torch.Tensor:
        return device.to_device(document_mask(positions_BS))

    sources = len(source_names(config)) if config.logging.log_loss_per_source else 0
    return BatchSource(config, layout, device, document_bounds if _packs_documents(config) else mask, sources=sources)


def further_losses(config: TrainerConfig) -> tuple[str, ...]:
    """Return the names of the losses that reports have after `LOSSES` and that are not minimised."""
    if not config.logging.log_loss_per_source:
        return ()
    return tuple(f"{LM_LOSS} {name}" for name in source_names(config))


def _packs_documents(config: TrainerConfig) -> bool:
    """Return whether attention takes the bounds of documents; other layers, and those that read it, take a mask."""
    reads_scores = config.fbd.enabled or config.control.enabled or config.control.scope_capture_interval is not None
    return implementation_of(config) == "torch" and not reads_scores


def build_iterators(
    config: TrainerConfig,
    layout: Layout,
    consumed_samples: int,
    *,
    order_samples: int | None = None,
    stream_state: str | None = None,
) -> DataIterators:
    """Iterate over microbatches of this rank from the given sample on; `order_samples` and `stream_state` as in
    `TrainState`.
    """
    if config.data.mock_data:
        from megatronapp_trainer.data.mock_data import build_mock_iterators

        return build_mock_iterators(config, layout, consumed_samples)
    if config.data.hf_dataset is not None:
        from megatronapp_trainer.data.streaming.batches import build_streamed_iterators

        return build_streamed_iterators(config, layout, consumed_samples, stream_state=stream_state)
    from megatronapp_trainer.data.iterators import build_train_valid_test_iterators

    return build_train_valid_test_iterators(config, layout, consumed_samples, order_samples=order_samples)


def _build_chunk(
    config: TrainerConfig,
    core_config: Any,  # noqa: ANN401 - TransformerConfig
    layout: Layout,
    chunk: int,
    vocab_size: int,
    *,
    drawn: bool = True,
    parts: FusedParts = _PLAIN,
) -> Any:  # noqa: ANN401 - GPTModel
    from megatron.core.models.gpt import GPTModel

    model_class: Any = GPTModel
    if parts.cross_entropy:
        from megatronapp_trainer.models.kernels.modules import with_fused_loss

        model_class = with_fused_loss(GPTModel)
    model, vp_stage = config.model, chunk if layout.virtual_size > 1 else None
    place = layout.place_in_loop(chunk)
    gpt = model_class(
        core_config,
        block_spec(
            implementation_of(config),
            core_config,
            vp_stage,
            place,
            grouped=model.moe_grouped_gemm,
            parts=parts,
        ),
        vocab_size,
        model.positions,
        pre_process=place == 0 and chunk == 0,
        post_process=place == layout.pipeline_size - 1 and chunk == layout.virtual_size - 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        pg_collection=chunk_groups(layout, chunk),
        vp_stage=vp_stage,
    )
    if drawn:
        initialize_weights(gpt, model, seed=config.training.seed, layout=layout)
    return gpt
