"""Datasets that the flags request of megatron-core. Needs neither torch nor megatron-core."""

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.config.batch_size import batch_schedule
from megatronapp_trainer.data.datasets import DEFAULT_SPLIT, DatasetRequest, MaskingRequest, blends_from_flags
from megatronapp_trainer.data.sft.form import ConversationForm


def source_names(config: TrainerConfig) -> tuple[str, ...]:
    """Return the names in the log of all corpora of a run, in the order of `DatasetRequest.prefixes`.

    A name is the last part of a prefix, without `_text_document`; where several are equal, the whole prefix.
    """
    prefixes = dataset_request(config, 1).prefixes
    short = [prefix.rsplit("/", 1)[-1].removesuffix("_text_document") for prefix in prefixes]
    return tuple(name if short.count(name) == 1 else prefix for name, prefix in zip(short, prefixes, strict=True))


def sample_counts(config: TrainerConfig, data_size: int) -> tuple[int, int, int]:
    """Return the samples of training, of one evaluation and of the test."""
    training, evaluation = config.training, config.logging.eval_iters * config.global_batch_size(data_size)
    if training.train_samples is not None:
        return training.train_samples, evaluation, evaluation
    return batch_schedule(config, data_size).samples_of(training.train_iters), evaluation, evaluation


def dataset_request(config: TrainerConfig, data_size: int, *, order_samples: int | None = None) -> DatasetRequest:
    """Describe the datasets of a run of `data_size` replicas; `order_samples` as in `TrainState`.

    Raises UsageError for an invalid blend.
    """
    data = config.data
    training, *others = sample_counts(config, data_size)
    blend, per_split = blends_from_flags(
        data.data_path, (data.train_data_path, data.valid_data_path, data.test_data_path)
    )
    return DatasetRequest(
        blend=blend,
        blend_per_split=per_split,
        split=data.split or DEFAULT_SPLIT,
        samples=(order_samples or training, None if config.logging.full_validation else others[0], others[1]),
        sequence_length=config.model.seq_length,
        seed=config.training.seed,
        cache_path=data.data_cache_path,
        mmap_bin_files=data.mmap_bin_files,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        masking=_masking(config) if config.model.type == "bert" else None,
        conversations=_conversations(config) if data.sft else None,
        separates_validation=config.logging.multiple_validation_sets,
        marks_sources=config.logging.log_loss_per_source,
    )


def _conversations(config: TrainerConfig) -> ConversationForm:
    return ConversationForm(
        vocabulary=config.data,
        prompt_format=config.data.sft_tokenizer_prompt_format,
        sequence_length=config.model.seq_length,
        seed=config.training.seed,
        cache_path=config.data.data_cache_path,
    )


def _masking(config: TrainerConfig) -> MaskingRequest:
    return MaskingRequest(
        probability=config.data.mask_prob,
        short_probability=config.data.short_seq_prob,
        has_pairs=config.model.bert_binary_head,
    )
