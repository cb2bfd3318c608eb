"""The three streams of batches of a training run."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data.batches import BatchStream, collate
from megatronapp_trainer.data.datasets import (
    BuiltDatasets,
    DatasetRequest,
    SampleDataset,
    build_datasets,
    check_request,
    check_training_has_data,
    warn_of_repeated_order,
)
from megatronapp_trainer.data.microbatches import DataIterators, ValidationSet
from megatronapp_trainer.data.request import dataset_request, sample_counts
from megatronapp_trainer.data.sampler import SampleOrder
from megatronapp_trainer.data.vocabulary import Vocabulary, load_vocabulary
from megatronapp_trainer.parallel.agreement import Agreement, gather_from_all, on_all_ranks
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
    datasets: BuiltDatasets | None = None
    for builds_now in (layout.rank == 0, layout.rank != 0 and layout.local_rank == 0, layout.local_rank != 0):
        agreement = Agreement()
        if builds_now and (layout.tensor_rank == 0 or layout.local_rank == 0):
            with agreement.attempt():
                datasets = _datasets(request, vocabulary, check=layout.local_rank == 0)
        agreement.settle()
    lengths = _validation_lengths(config, request, datasets)
    if layout.tensor_rank != 0 or datasets is None:
        datasets = BuiltDatasets(train=None, valid=None, test=None)
    stream = functools.partial(_stream, config, layout, vocab_size=vocabulary.vocab_size)
    return DataIterators(
        train=stream(datasets.train, consumed_samples=consumed_samples),
        valid=stream(datasets.valid) if request.wants(1) and not lengths else None,
        test=stream(datasets.test) if request.wants(2) else None,
        valid_sets=_validation_sets(config, layout, datasets, lengths, stream),
    )


def _validation_lengths(
    config: TrainerConfig, request: DatasetRequest, datasets: BuiltDatasets | None
) -> tuple[int, ...]:
    """Return the samples of each validation set of which there are several, or that is read as a whole; collective.

    Ranks that read nothing learn them from the first one.
    """
    if not (request.wants(1) and (config.logging.full_validation or request.separates_validation)):
        return ()
    own: tuple[int, ...] = ()
    if datasets is not None:
        own = tuple(len(part) for part in datasets.valid_sets or (datasets.valid,) if part is not None)
    return gather_from_all(own)[0]


def _validation_sets(
    config: TrainerConfig,
    layout: Layout,
    datasets: BuiltDatasets,
    lengths: Sequence[int],
    stream: Callable[..., Iterator[Any]],
) -> tuple[ValidationSet, ...]:
    """Return the sets of these numbers of samples, each with its stream."""
    if not lengths:
        return ()
    batch, logging = config.global_batch_size(layout.data_size), config.logging
    parts = datasets.valid_sets or ((datasets.valid,) if datasets.valid is not None else (None,) * len(lengths))
    numbered = tuple(str(number) for number in range(len(lengths)))
    names = (logging.validation_set_names or numbered) if logging.multiple_validation_sets else ("",)
    return tuple(
        ValidationSet(
            name=name,
            iterator=stream(part, whole=logging.full_validation),
            global_batches=-(-length // batch) if logging.full_validation else logging.eval_iters,
        )
        for name, part, length in zip(names, parts, lengths, strict=True)
    )


def _datasets(request: DatasetRequest, vocabulary: Vocabulary, *, check: bool) -> BuiltDatasets:
    check_training_has_data(request)
    if check:
        check_request(request, vocabulary)
    built = build_datasets(request, vocabulary)
    if check:
        warn_of_repeated_order(request, built.train)
    return built


def _stream(
    config: TrainerConfig,
    layout: Layout,
    dataset: SampleDataset | None,
    *,
    vocab_size: int,
    consumed_samples: int | None = None,
    whole: bool = False,
) -> Iterator[Any]:
    """Return batches of a dataset: of training after `consumed_samples`, or of an evaluation, which starts again each
    time; `whole`: after all samples, of which each counts once.
    """
    if dataset is None:
        return iter(())
    _, evaluation, _ = sample_counts(config, layout.data_size)
    if whole:
        batch = config.global_batch_size(layout.data_size)
        evaluation = -(-len(dataset) // batch) * batch
    sampler = SampleOrder(
        consumed_samples=consumed_samples or 0,
        micro_batch_size=config.training.micro_batch_size,
        data_rank=layout.data_rank,
        data_size=layout.data_size,
        size=len(dataset),
        restart_after=evaluation if consumed_samples is None else None,
        counts_once=whole,
    )
    return BatchStream(dataset, sampler, vocab_size, config.data.num_workers, _collate_of(config))


def _collate_of(config: TrainerConfig) -> Callable[[Sequence[dict[str, Any]], int], Any]:
    if config.model.type == "bert":
        from megatronapp_trainer.data.bert.microbatches import collate as collate_masked

        return collate_masked
    return collate
