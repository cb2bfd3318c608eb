"""Batches made of samples, read ahead by threads.

Threads rather than processes: samples are read from mapped files in C code that releases the interpreter lock, and
forking a process that runs CUDA or OpenMP is unsafe. Nothing here draws from torch's random numbers.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from megatronapp_trainer.data.datasets import SampleDataset
from megatronapp_trainer.data.microbatches import TOGETHER, HostMicrobatch
from megatronapp_trainer.data.sampler import SampleOrder
from megatronapp_trainer.errors import DataError

_AHEAD_PER_WORKER = 2
_AHEAD_AT_LEAST = 2 * TOGETHER
"""Microbatches to read ahead: while one group is copied to the device the next is read."""


def collate(samples: Sequence[dict[str, Any]], vocab_size: int) -> HostMicrobatch:
    """Stack samples: tokens, labels, position_ids int64 [b, s], loss_mask float32 [b, s], source int64 [b] if any.

    Raises:
        DataError: a token for which the model has no embedding.
    """

    def stacked(key: str) -> torch.Tensor:
        return torch.stack([sample[key] for sample in samples])

    tokens, labels = stacked("tokens"), stacked("labels")
    for ids in (tokens, labels):
        _refuse_foreign(ids, vocab_size)
    batch: HostMicrobatch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": stacked("loss_mask"),
        "position_ids": stacked("position_ids"),
    }
    if "source" in samples[0]:
        batch["source"] = torch.tensor([sample["source"] for sample in samples])
    return batch


def _refuse_foreign(ids: torch.Tensor, vocab_size: int) -> None:
    largest, least = int(ids.max()), int(ids.min())
    if largest >= vocab_size or least < 0:
        raise DataError(
            f"the corpus has token id {largest if largest >= vocab_size else least} outside the vocabulary of "
            f"{vocab_size}; was it made with another tokenizer, or damaged?"
        )


class BatchStream:
    """Endless iterator over the microbatches of one replica, read ahead by `workers` threads (0: not ahead)."""

    def __init__(
        self,
        dataset: SampleDataset,
        sampler: SampleOrder,
        vocab_size: int,
        workers: int,
        collate_samples: Callable[[Sequence[dict[str, Any]], int], Any] = collate,
    ) -> None:
        """Take samples and their order; `collate_samples` stacks those of a microbatch, in the form of the model."""
        self._collate = collate_samples
        self._dataset = dataset
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._next = 0
        self._ahead = max(workers * _AHEAD_PER_WORKER, _AHEAD_AT_LEAST)
        self._waiting: deque[Future[Any]] = deque()
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="data") if workers > 0 else None

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - microbatch of the family
        if self._executor is None:
            return self._read(self._take())
        while len(self._waiting) <= self._ahead:
            self._waiting.append(self._executor.submit(self._read, self._take()))
        return self._waiting.popleft().result()

    def close(self) -> None:
        """End the threads. The stream must not be read any more."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> int:
        microbatch = self._next
        self._next += 1
        return microbatch

    def _read(self, microbatch: int) -> Any:  # noqa: ANN401 - microbatch of the family
        indices, counted = self._sampler.indices(microbatch), self._sampler.counted(microbatch)
        samples = [self._dataset[index] for index in indices]
        samples = [
            sample if counts else {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}
            for sample, counts in zip(samples, counted, strict=True)
        ]
        return self._collate(samples, self._vocab_size)
