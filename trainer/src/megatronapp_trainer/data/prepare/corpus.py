"""Writing of Megatron's .bin/.idx pair in one pass that can be stopped and resumed.

While it grows, a corpus is stored in `PREFIX.preparing/`: tokens are written to the future .bin file, document lengths
to a file next to it, and a journal records, after both have reached the disk, their valid sizes and the position in the
input. A restart truncates both files to the journal. At the end `finished.json` marks the files as complete, and they
are renamed into place, the .idx last, so that a reader never sees half a corpus.
"""

import itertools
import json
import os
import pathlib
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, Self

import numpy as np

from megatronapp_trainer.data.prepare.documents import BatchResult, EncodedTexts
from megatronapp_trainer.data.prepare.sources import START, DocumentBatch, InputPosition
from megatronapp_trainer.utils.atomic_files import write_atomically
from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports

with silence_megatron_imports():
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

JOURNAL = "journal.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusJournal:
    """State safely on disk. Counts are per key; `fingerprint` identifies inputs and options."""

    fingerprint: str
    position: InputPosition = START
    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    """Only of a corpus of sentences."""
    bad_lines: int = 0
    empty_documents: int = 0


def read_journal(directory: pathlib.Path, fingerprint: str) -> CorpusJournal | None:
    """Read the journal in `directory`; None if it belongs to other inputs or options."""
    try:
        stored: dict[str, Any] = json.loads((directory / JOURNAL).read_text(encoding="utf-8"))
        journal = CorpusJournal(**{**stored, "position": InputPosition(**stored["position"])})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return journal if journal.fingerprint == fingerprint else None


def write_journal(directory: pathlib.Path, journal: CorpusJournal) -> None:
    """Replace the journal, safely on disk when this returns."""
    write_atomically(directory / JOURNAL, json.dumps(asdict(journal)).encode())


class _GrowingBuilder(IndexedDatasetBuilder):  # type: ignore[misc]  # megatron-core is untyped
    """megatron-core's builder on a file that may have documents already, fed with many documents at once."""

    def __init__(
        self, data_file: IO[bytes], dtype: type[np.generic], lengths: list[int], boundaries: list[int]
    ) -> None:
        # The parent's __init__ truncates its file; it does nothing but set these.
        self.data_file = data_file
        self.dtype = dtype
        self.multimodal = False
        self.sequence_lengths = lengths
        self.document_indices = boundaries
        self.sequence_modes = None

    def add_encoded(self, encoded: EncodedTexts) -> None:
        """Append the documents of a batch."""
        self.data_file.write(encoded.ids)
        before = len(self.sequence_lengths)
        self.sequence_lengths.extend(encoded.lengths.tolist())
        if encoded.sequences is None:
            self.document_indices.extend(range(before + 1, before + 1 + len(encoded.lengths)))
        else:
            self.document_indices.extend((before + np.cumsum(encoded.sequences)).tolist())


class CorpusWriter:
    """A growing .bin/.idx pair. The counts of the journal give the valid size of its files."""

    def __init__(
        self, directory: pathlib.Path, key: str, dtype: str, journal: CorpusJournal, *, has_sentences: bool
    ) -> None:
        documents, tokens = journal.documents.get(key, 0), journal.tokens.get(key, 0)
        sequences = journal.sequences.get(key, 0) if has_sentences else documents
        self._index = directory / f"{key}.idx"
        self._data = directory / f"{key}.bin"
        numpy_type = np.dtype(dtype).type
        self._lengths_file, lengths = _open_counts(directory / f"{key}.lengths", sequences)
        self._counts_file: IO[bytes] | None = None
        boundaries = list(range(documents + 1))
        if has_sentences:
            self._counts_file, counts = _open_counts(directory / f"{key}.sentences", documents)
            boundaries = [0, *itertools.accumulate(counts)]
        data_file = _open_truncated(self._data, tokens * np.dtype(dtype).itemsize)
        self._builder = _GrowingBuilder(data_file, numpy_type, lengths, boundaries)
        self.documents = documents
        self.sequences = sequences
        self.tokens = tokens

    def add(self, encoded: EncodedTexts) -> None:
        """Append the documents of one batch."""
        self._builder.add_encoded(encoded)
        self._lengths_file.write(encoded.lengths.tobytes())
        if self._counts_file is not None and encoded.sequences is not None:
            self._counts_file.write(encoded.sequences.tobytes())
        self.documents += encoded.documents
        self.sequences += len(encoded.lengths)
        self.tokens += int(encoded.lengths.sum())

    def sync(self) -> None:
        """Flush everything added so far to the disk."""
        for stream in (self._builder.data_file, *self._count_files()):
            stream.flush()
            os.fsync(stream.fileno())

    def finish(self) -> None:
        """Write the index; .bin and .idx are safely on disk when this returns."""
        self.sync()
        for stream in self._count_files():
            stream.close()
        self._builder.finalize(str(self._index))
        with self._index.open("rb") as stream:
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Close the files without finishing."""
        for stream in (self._builder.data_file, *self._count_files()):
            stream.close()

    def _count_files(self) -> list[IO[bytes]]:
        return [self._lengths_file] if self._counts_file is None else [self._lengths_file, self._counts_file]


def _open_counts(path: pathlib.Path, count: int) -> tuple[IO[bytes], list[int]]:
    """Open a file of int32 for appending after its first `count` numbers, and return those, too."""
    stream = _open_truncated(path, count * np.dtype(np.int32).itemsize)
    return stream, np.fromfile(path, dtype=np.int32, count=count).tolist()


def _open_truncated(path: pathlib.Path, size_bytes: int) -> IO[bytes]:
    """Open `path` for appending after its first `size_bytes`."""
    stream = path.open("ab")
    if stream.tell() < size_bytes:
        stream.close()
        raise OSError(f"{path} is shorter than its journal requires; remove {path.parent} and start again")
    stream.truncate(size_bytes)
    return stream


class CorpusFiles:
    """The growing files of all JSON keys of one preparation, with their journal."""

    def __init__(
        self,
        directory: pathlib.Path,
        fingerprint: str,
        keys: tuple[str, ...],
        dtype: str,
        *,
        has_sentences: bool = False,
    ) -> None:
        """Open the files of a preparation, at the state of its journal; `has_sentences`: documents are split."""
        self._has_sentences = has_sentences
        self._directory = directory
        self._journal = read_journal(directory, fingerprint) or CorpusJournal(fingerprint=fingerprint)
        self._uncommitted_bytes = 0
        self._writers = {
            key: CorpusWriter(directory, key, dtype, self._journal, has_sentences=has_sentences) for key in keys
        }

    @property
    def position(self) -> InputPosition:
        """Return the position of the input at which reading continues."""
        return self._journal.position

    def add(self, batch: DocumentBatch, result: BatchResult, *, commit_bytes: int) -> None:
        """Append the documents of a batch; commits once `commit_bytes` of input are added since the last commit."""
        for key, encoded in result.encoded.items():
            self._writers[key].add(encoded)
        self._journal = replace(
            self._journal,
            position=batch.end,
            bad_lines=self._journal.bad_lines + len(result.bad),
            empty_documents=self._journal.empty_documents + result.empty,
        )
        self._uncommitted_bytes += batch.size_bytes
        if self._uncommitted_bytes >= commit_bytes:
            self.commit()

    def commit(self) -> CorpusJournal:
        """Make everything added so far safe on disk."""
        for writer in self._writers.values():
            writer.sync()
        self._journal = replace(
            self._journal,
            documents={key: writer.documents for key, writer in self._writers.items()},
            tokens={key: writer.tokens for key, writer in self._writers.items()},
            sequences={key: writer.sequences for key, writer in self._writers.items()} if self._has_sentences else {},
        )
        write_journal(self._directory, self._journal)
        self._uncommitted_bytes = 0
        return self._journal

    def finish(self) -> None:
        """Write the indexes: per key `KEY.bin` and `KEY.idx` are complete, still in the working directory."""
        for writer in self._writers.values():
            writer.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for writer in self._writers.values():
            writer.close()
