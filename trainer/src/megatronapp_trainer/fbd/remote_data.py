"""Data of backward ranks: they name the samples that forward ranks read, and read none."""

from collections.abc import Iterator
from typing import Any, NoReturn

from megatronapp_trainer.data.microbatches import DataIterators
from megatronapp_trainer.errors import TaskOrderError
from megatronapp_trainer.fbd.channels.commands import Split


class RemoteSamples:
    """Takes the place of an iterator of microbatches where forward ranks have it."""

    def __init__(self, split: Split | None) -> None:
        """Name the samples of an evaluation; None: those of training."""
        self.split = split

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        raise TaskOrderError("a backward rank was asked for a microbatch, and forward ranks alone read data")


def remote_iterators(splits: frozenset[Split]) -> DataIterators:
    """Return iterators that name their samples; `splits`: those of evaluations that forward ranks have."""
    valid, test = (RemoteSamples(split) if split in splits else None for split in (Split.VALIDATION, Split.TEST))
    return DataIterators(train=RemoteSamples(None), valid=valid, test=test)


def split_of(iterator: Iterator[Any]) -> Split:
    """Return the samples of an evaluation that an iterator names."""
    assert isinstance(iterator, RemoteSamples) and iterator.split is not None
    return iterator.split
