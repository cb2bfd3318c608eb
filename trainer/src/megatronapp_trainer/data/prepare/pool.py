"""Encoding of batches in worker processes, with results in the order of the input.

Processes rather than the tokenizer library's threads: JSON parsing and the transfer of ids hold the interpreter lock
and would limit the speed on a large node. With one worker the library's threads are used in this process.
"""

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from megatronapp_trainer.data.prepare.documents import BatchResult, EncodeOptions, Encoder
from megatronapp_trainer.data.prepare.sources import DocumentBatch
from megatronapp_trainer.errors import DataError

_AHEAD_PER_WORKER = 3

_encoder: Encoder | None = None


def encode_in_order(
    work: Iterable[DocumentBatch], tokenizer_json: str, options: EncodeOptions, workers: int
) -> Iterator[tuple[DocumentBatch, BatchResult]]:
    """Yield every batch with its result. At most three batches per worker are in memory.

    Raises:
        DataError: a worker process died, which is nearly always a lack of memory.
    """
    if workers == 1:
        encoder = Encoder(tokenizer_json, options)
        for batch in work:
            yield batch, encoder(batch)
        return
    with _executor(tokenizer_json, options, workers) as executor:
        try:
            yield from _ordered(executor, work, workers * _AHEAD_PER_WORKER)
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenising process was killed, most likely for lack of memory; use fewer --workers and start again"
            ) from error


@contextlib.contextmanager
def _executor(tokenizer_json: str, options: EncodeOptions, workers: int) -> Iterator[ProcessPoolExecutor]:
    executor = ProcessPoolExecutor(
        max_workers=workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer_json, options),
    )
    try:
        yield executor
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _ordered(
    executor: ProcessPoolExecutor, work: Iterable[DocumentBatch], ahead: int
) -> Iterator[tuple[DocumentBatch, BatchResult]]:
    waiting: deque[tuple[DocumentBatch, Future[BatchResult]]] = deque()
    for batch in work:
        waiting.append((batch, executor.submit(_encode, batch)))
        if len(waiting) >= ahead:
            done, future = waiting.popleft()
            yield done, future.result()
    for done, future in waiting:
        yield done, future.result()


def _start_worker(tokenizer_json: str, options: EncodeOptions) -> None:
    global _encoder  # noqa: PLW0603  # one per process, made once: building it for every batch would cost more than the batch
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(tokenizer_json, options)


def _encode(batch: DocumentBatch) -> BatchResult:
    if _encoder is None:
        raise RuntimeError("the worker was not started by _start_worker")
    return _encoder(batch)
