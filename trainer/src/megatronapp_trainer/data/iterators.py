"""The three streams of batches of a training run."""

from collections.abc import Iterator

from megatronapp_trainer.batch import Batch, DataIterators
from megatronapp_trainer.collective import Agreement, on_all_ranks
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.batches import BatchStream
from megatronapp_trainer.data.datasets import (
    DEFAULT_SPLIT,
    DatasetRequest,
    SampleDataset,
    blends_from_flags,
    build_datasets,
    check_request,
)
from megatronapp_trainer.data.sampler import Sampler
from megatronapp_trainer.data.vocabulary import Vocabulary, load_vocabulary
from megatronapp_trainer.errors import DataError
from megatronapp_trainer.layout import Layout


def vocabulary_size(config: TrainerConfig) -> int:
    """Tokens before padding. Raises UsageError where no flag tells, DataError where the tokenizer cannot be read."""
    return load_vocabulary(config.data).vocab_size


def build_train_valid_test_iterators(config: TrainerConfig, layout: Layout, consumed_samples: int) -> DataIterators:
    """Microbatches of this rank's replica; training goes on after `consumed_samples`. Collective over all ranks.

    Validation and test repeat after `--eval-iters` global batches, so that every evaluation sees the same samples, even
    after a resume and at another number of replicas. They are None where there is nothing to evaluate on. Only rank 0
    of a tensor group reads; the iterators of the others are empty.

    Rank 0 builds the order of samples first, then one rank of each node (which finds it where nodes share a file
    system), then all others, so that it is built once per file system.

    Raises:
        UsageError: the flags do not name data or tokens.
        DataError: the data is missing, damaged or too short; on every rank, naming the one that found it.
    """
    request, vocabulary = on_all_ranks(lambda: (dataset_request(config, layout), load_vocabulary(config.data)))
    datasets: list[SampleDataset | None] = []
    for turn in (layout.rank == 0, layout.rank != 0 and layout.local_rank == 0, layout.local_rank != 0):
        agreement = Agreement()
        if turn and (layout.tensor_rank == 0 or layout.local_rank == 0):
            with agreement.attempt():
                datasets = _datasets(request, vocabulary, check=layout.local_rank == 0)
        agreement.settle()
    if layout.tensor_rank != 0:
        datasets = [None, None, None]
    train, valid, test = (
        _stream(
            config, layout, dataset, vocabulary.vocab_size, consumed_samples=consumed_samples if number == 0 else None
        )
        for number, dataset in enumerate(datasets)
    )
    return DataIterators(
        train=train, valid=valid if request.wants(1) else None, test=test if request.wants(2) else None
    )


def _datasets(request: DatasetRequest, vocabulary: Vocabulary, *, check: bool) -> list[SampleDataset | None]:
    if not request.wants(0):
        raise DataError("training has no data; give it a share with --split, or a --train-data-path")
    if check:
        check_request(request, vocabulary)
    return build_datasets(request, vocabulary)


def sample_counts(config: TrainerConfig, data_size: int) -> tuple[int, int, int]:
    """Samples of training, of one evaluation and of the test. Those of training are an upper bound under a ramp-up."""
    batch = config.global_batch_size(data_size)
    evaluation = config.logging.eval_iters * batch
    return config.training.train_iters * batch, evaluation, evaluation


def dataset_request(config: TrainerConfig, layout: Layout) -> DatasetRequest:
    """What the flags ask megatron-core to build."""
    data = config.data
    blend, per_split = blends_from_flags(
        data.data_path, (data.train_data_path, data.valid_data_path, data.test_data_path)
    )
    return DatasetRequest(
        blend=blend,
        blend_per_split=per_split,
        split=data.split or DEFAULT_SPLIT,
        samples=sample_counts(config, layout.data_size),
        sequence_length=config.model.seq_length,
        seed=config.training.seed,
        cache_path=data.data_cache_path,
        mmap_bin_files=data.mmap_bin_files,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )


def _stream(
    config: TrainerConfig,
    layout: Layout,
    dataset: SampleDataset | None,
    vocab_size: int,
    *,
    consumed_samples: int | None,
) -> Iterator[Batch]:
    """Batches of a dataset: of training after `consumed_samples`, or of an evaluation, which begins anew each time."""
    if dataset is None:
        return iter(())
    _, evaluation, _ = sample_counts(config, layout.data_size)
    sampler = Sampler(
        consumed_samples=consumed_samples or 0,
        micro_batch_size=config.training.micro_batch_size,
        data_rank=layout.data_rank,
        data_size=layout.data_size,
        size=len(dataset),
        restart_after=evaluation if consumed_samples is None else None,
    )
    return BatchStream(dataset, sampler, vocab_size, config.data.num_workers)
