"""Microbatches of streamed samples.

Readers take turns in a fixed order, which is the same on any number of replicas. The g-th microbatch of the training,
over all replicas, is read by reader g modulo the number of readers.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatronapp_trainer.config import DataConfig, TrainerConfig
from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.batches import collate
from megatronapp_trainer.data.microbatches import TOGETHER, DataIterators, HostMicrobatch
from megatronapp_trainer.data.streaming.readers import TextForm, TextReader
from megatronapp_trainer.data.streaming.sources import is_text, local_files, open_parts
from megatronapp_trainer.data.vocabulary import load_vocabulary
from megatronapp_trainer.errors import DataError
from megatronapp_trainer.parallel.agreement import gather_from_all, on_all_ranks
from megatronapp_trainer.parallel.layout import Layout

_AHEAD = 2 * TOGETHER
"""Microbatches to read ahead."""


class StreamedBatches:
    """Iterator over the microbatches of a replica, which knows the state of its readers after each."""

    def __init__(
        self,
        readers: Mapping[int, TextReader],
        *,
        first: int,
        stride: int,
        count: int,
        samples: int,
        vocab_size: int,
        ahead: bool,
    ) -> None:
        """Take the readers of a replica by their numbers.

        Args:
            readers: those that this replica needs.
            first: number of the first microbatch, over all replicas.
            stride: number of replicas.
            count: number of all readers.
            samples: samples of a microbatch.
            vocab_size: of the model.
            ahead: read ahead in a thread.
        """
        self._readers = readers
        self._next, self._stride, self._count = first, stride, count
        self._samples, self._vocab_size = samples, vocab_size
        self._waiting: deque[Future[tuple[HostMicrobatch, int, Any]]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="data") if ahead else None
        self.states = {number: reader.state() for number, reader in readers.items()}
        """States of the readers after the microbatches that were taken, by their numbers."""

    def __iter__(self) -> "StreamedBatches":
        return self

    def __next__(self) -> HostMicrobatch:
        if self._executor is None:
            batch, number, state = self._read(self._take())
        else:
            while len(self._waiting) <= _AHEAD:
                self._waiting.append(self._executor.submit(self._read, self._take()))
            batch, number, state = self._waiting.popleft().result()
        self.states[number] = state
        return batch

    def _take(self) -> int:
        number = self._next % self._count
        self._next += self._stride
        return number

    def _read(self, number: int) -> tuple[HostMicrobatch, int, Any]:
        reader = self._readers[number]
        samples = [reader.next_sample() for _ in range(self._samples)]
        return collate(samples, self._vocab_size), number, reader.state()


class RepeatedEvaluation:
    """Iterator that reads the same microbatches in each evaluation; they stay in memory."""

    def __init__(self, batches: StreamedBatches, count: int) -> None:
        self._batches, self._count = batches, count
        self._stored: list[HostMicrobatch] = []
        self._next = 0

    def __iter__(self) -> "RepeatedEvaluation":
        return self

    def __next__(self) -> HostMicrobatch:
        if len(self._stored) < self._count:
            self._stored.append(next(self._batches))
            return self._stored[-1]
        self._next += 1
        return self._stored[(self._next - 1) % self._count]


def build_streamed_iterators(
    config: TrainerConfig, layout: Layout, consumed_samples: int, *, stream_state: str | None
) -> DataIterators:
    """Return the microbatches of this rank's replica; training continues from the state of a checkpoint. Collective.

    Raises:
        UsageError: the package `datasets` is missing, or the readers cannot be shared by the replicas.
        DataError: the data cannot be read, or the checkpoint has no state of a stream.
    """
    return on_all_ranks(lambda: _iterators(config, layout, consumed_samples, stream_state))


def _iterators(config: TrainerConfig, layout: Layout, consumed_samples: int, stream_state: str | None) -> DataIterators:
    data, size, logging = config.data, config.training.micro_batch_size, config.logging
    states = _states(config, layout, consumed_samples, stream_state)
    source = _source(data)
    count = len(states)
    if layout.tensor_rank != 0:
        evaluates = data.hf_valid_dataset is not None and logging.eval_iters > 0
        return DataIterators(
            train=iter(()), valid=iter(()) if evaluates else None, test=None, stream_state=_collected({}, size, source)
        )

    def batches(flag: str, paths: tuple[str, ...], states: Mapping[int, Any], first: int) -> StreamedBatches:
        tokenizer, form = _tokenizer_and_form(config, flag)
        open_part = open_parts(flag, paths, data.hf_split, len(states))
        readers = {
            number: TextReader(lambda number=number: open_part(number), tokenizer, form, state)  # type: ignore[misc]
            for number, state in states.items()
            if (number - first) % layout.data_size == layout.data_rank
        }
        return StreamedBatches(
            readers,
            first=first + layout.data_rank,
            stride=layout.data_size,
            count=len(states),
            samples=size,
            vocab_size=load_vocabulary(data).vocab_size,
            ahead=data.num_workers > 0,
        )

    assert data.hf_dataset is not None
    train, valid = batches("--hf-dataset", data.hf_dataset, states, consumed_samples // size), None
    if data.hf_valid_dataset is not None and logging.eval_iters > 0:
        fresh = dict.fromkeys(range(count))
        microbatches = logging.eval_iters * config.most_microbatches(layout.data_size)
        streamed = batches("--hf-valid-dataset", data.hf_valid_dataset, fresh, 0)
        valid = RepeatedEvaluation(streamed, microbatches)
    own = train.states if layout.is_first_stage else {}
    return DataIterators(train=train, valid=valid, test=None, stream_state=_collected(own, size, source))


def _tokenizer_and_form(config: TrainerConfig, flag: str) -> tuple[tokenizers.Tokenizer, TextForm]:
    data = config.data
    tokenizer = tokenizers.load(
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        tokenizer_file=data.tokenizer_file,
        tokenizer_type=data.tokenizer_type,
    )
    try:
        _ = tokenizer.eod
    except DataError as error:
        raise DataError(f"{flag} ends each document by a token, but {error}") from error
    form = TextForm(
        flag=flag,
        field=data.hf_text_field,
        sequence_length=config.model.seq_length,
        eod_mask_loss=data.eod_mask_loss,
        restarts_positions=data.reset_position_ids or data.reset_attention_mask,
    )
    return tokenizer, form


def _states(
    config: TrainerConfig, layout: Layout, consumed_samples: int, stream_state: str | None
) -> dict[int, dict[str, Any] | None]:
    """Return the state of each reader by its number; None: it begins."""
    if stream_state is None:
        if consumed_samples:
            raise DataError(
                "the checkpoint has no state of --hf-dataset, so its stream cannot be continued; give --finetune to "
                "take its weights alone, or the data that it was trained on"
            )
        count = config.data.hf_readers or layout.data_size
        found: dict[int, dict[str, Any] | None] = dict.fromkeys(range(count))
    else:
        stored = json.loads(stream_state)
        if stored["microBatchSize"] != config.training.micro_batch_size:
            raise DataError(
                f"--micro-batch-size was {stored['microBatchSize']} when the stream of --hf-dataset was saved; give "
                "the same, because readers take turns by microbatches"
            )
        if "source" in stored:
            _check_source(stored["source"], _source(config.data))
        found = {int(number): state for number, state in stored["readers"].items()}
        if config.data.hf_readers not in {None, len(found)}:
            raise DataError(
                f"--hf-readers is {config.data.hf_readers}, but the stream of the checkpoint has {len(found)}, which "
                "cannot change; leave the flag out"
            )
    if len(found) % layout.data_size != 0:
        raise DataError(
            f"{len(found)} readers of --hf-dataset cannot be shared by {layout.data_size} replicas; take a number of "
            "replicas that divides it, or begin with --hf-readers that all of them divide"
        )
    return found


def _source(data: DataConfig) -> dict[str, Any]:
    """Return what a stream reads, for its state: files may move to another folder."""
    paths = data.hf_dataset or ()
    files = local_files(paths)
    return {
        "names": [os.path.basename(os.path.normpath(path)) for path in paths],
        "split": data.hf_split,
        "files": len(files),
        "bytes": sum(size for _, size in files),
        "digest": hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16],
        "text": "documents" if is_text(files) else None,
    }


def _check_source(there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise DataError unless a stream of a checkpoint reads what the run does.

    States of earlier releases have no files, and of plain text they have a place among lines.
    """
    advice = "give the same --hf-dataset and --hf-split, or --finetune to take the weights alone"
    if here["text"] and "text" not in there:
        raise DataError(
            "the stream of the checkpoint is that of an earlier release, to which each line of a .txt was a document; "
            "now each file is, so it cannot be continued; give --finetune to take the weights alone"
        )
    if any(there[name] != here[name] for name in there if name in here):
        described, now = _described(there), _described(here if "files" in there else here | {"files": 0})
        raise DataError(
            f"the stream of the checkpoint is that of {described}, not of "
            f"{now if now != described else 'the files there now, whose names or sizes differ'}, so it cannot be "
            f"continued; {advice}"
        )


def _described(source: dict[str, Any]) -> str:
    files = f", {source['files']} files of {source['bytes']} bytes" if source.get("files") else ""
    return f"{' '.join(source['names'])} (split {source['split']}){files}"


def _collected(own: Mapping[int, Any], micro_batch_size: int, source: dict[str, Any]) -> Any:  # noqa: ANN401 - a closure
    """Return a function that returns the states of all readers as JSON; collective over all ranks."""

    def collect() -> str:
        readers: dict[int, Any] = {}
        for states in gather_from_all(dict(own)):
            readers |= states
        return json.dumps({"microBatchSize": micro_batch_size, "source": source, "readers": readers})

    return collect
