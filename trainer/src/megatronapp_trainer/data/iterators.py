"""The three streams of batches of a training run."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.batches import BatchStream, collate
from megatronapp_trainer.data.datasets import (
    DatasetRequest,
    SampleDataset,
    build_datasets,
    check_request,
    check_training_has_data,
)
from megatronapp_trainer.data.microbatches import DataIterators
from megatronapp_trainer.data.request import dataset_request, sample_counts
from megatronapp_trainer.data.sampler import SampleOrder
from megatronapp_trainer.data.vocabulary import Vocabulary, load_vocabulary
from megatronapp_trainer.parallel.agreement import Agreement, on_all_ranks
from megatronapp_trainer.parallel.layout import Layout


def vocabulary_size(config: TrainerConfig) -> int:
    """Return the number of tokens before padding.

    Raises UsageError if no flag gives it, DataError if the tokenizer cannot be read.
    """
    return load_vocabulary(config.data).vocab_size


def build_train_valid_test_iterators(
    config: TrainerConfig, layout: Layout, consumed_samples: int, *, order_samples: int | None = None
) -> DataIterators:
    """Return the microbatches of this rank's replica; training continues after `consumed_samples`. Collective over all
    ranks.

    `order_samples` as in `TrainState`.

    Validation and test repeat after `--eval-iters` global batches, so that every evaluation sees the same samples, even
    after a resume and at another number of replicas. They are None where there is nothing to evaluate on. Only rank 0
    of a tensor group reads; the iterators of the others are empty.

    Rank 0 builds the order of samples first, then one rank of each node (which finds it where nodes share a file
    system), then all others, so that it is built once per file system.

    Raises:
        UsageError: the flags do not name data or tokens.
        DataError: the data is missing, damaged or too short; on every rank, naming the one that found it.
    """
    request, vocabulary = on_all_ranks(
        lambda: (
            dataset_request(config, layout.data_size, order_samples=order_samples),
            load_vocabulary(config.data),
        )
    )
    datasets: list[SampleDataset | None] = []
    for builds_now in (layout.rank == 0, layout.rank != 0 and layout.local_rank == 0, layout.local_rank != 0):
        agreement = Agreement()
        if builds_now and (layout.tensor_rank == 0 or layout.local_rank == 0):
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
    check_training_has_data(request)
    if check:
        check_request(request, vocabulary)
    return build_datasets(request, vocabulary)


def _stream(
    config: TrainerConfig,
    layout: Layout,
    dataset: SampleDataset | None,
    vocab_size: int,
    *,
    consumed_samples: int | None,
) -> Iterator[Any]:
    """Return batches of a dataset: of training after `consumed_samples`, or of an evaluation, which starts again each
    time.
    """
    if dataset is None:
        return iter(())
    _, evaluation, _ = sample_counts(config, layout.data_size)
    sampler = SampleOrder(
        consumed_samples=consumed_samples or 0,
        micro_batch_size=config.training.micro_batch_size,
        data_rank=layout.data_rank,
        data_size=layout.data_size,
        size=len(dataset),
        restart_after=evaluation if consumed_samples is None else None,
    )
    return BatchStream(dataset, sampler, vocab_size, config.data.num_workers, _collate_of(config))


def _collate_of(config: TrainerConfig) -> Callable[[Sequence[dict[str, Any]], int], Any]:
    if config.model.type == "bert":
        from megatronapp_trainer.data.bert.microbatches import collate as collate_masked

        return collate_masked
    return collate
