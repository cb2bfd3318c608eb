"""Parsing of raw bytes to documents, and their encoding to token ids: the work of one worker process.

A worker imports `tokenizers` and numpy only, neither torch nor megatron-core, so that it starts fast.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencex
import tokenizers

from megatronapp_trainer.data.prepare.sources import DocumentBatch, DocumentFormat, InputChunk


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeOptions:
    """Settings of every worker. `dtype` names the numpy type of a stored token; `eod` is appended if given."""

    keys: tuple[str, ...]
    dtype: str
    eod: int | None
    sentences_of: str | None = None
    """Language (ISO 639) by whose rules documents are split into sentences; None: each is a single sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadLine:
    """A line that has no document, and the reason."""

    path: str
    line: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedTexts:
    """Token ids of one key of a batch, back to back, and the lengths of its sequences.

    A sequence is a document, or a sentence of one.
    """

    lengths: npt.NDArray[np.int32]
    ids: bytes
    sequences: npt.NDArray[np.int32] | None = None
    """Sequences of each document; None: documents have a single one."""
    empty: int = 0
    """Documents without any sentence, which are not written."""

    @property
    def documents(self) -> int:
        """Return the number of documents."""
        return len(self.lengths if self.sequences is None else self.sequences)


@dataclass(kw_only=True, slots=True)
class ParsedTexts:
    """Texts of a batch per key, in order, and the skipped lines."""

    texts: dict[str, list[str]]
    bad: list[BadLine] = field(default_factory=list)
    empty: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchResult:
    """Result of a worker for one batch."""

    encoded: dict[str, EncodedTexts]
    bad: tuple[BadLine, ...]
    empty: int


def parse(chunks: Sequence[InputChunk], keys: Sequence[str]) -> ParsedTexts:
    """Parse the documents of `chunks`. Empty documents are counted, blank lines skipped, unreadable lines listed."""
    parsed = ParsedTexts(texts={key: [] for key in keys})
    for chunk in chunks:
        if chunk.format is DocumentFormat.TEXT:
            _parse_text(chunk, keys[0], parsed)
        else:
            _parse_lines(chunk, keys, parsed)
    return parsed


def _parse_text(chunk: InputChunk, key: str, parsed: ParsedTexts) -> None:
    before = len(parsed.bad)
    try:
        text = chunk.payload.decode("utf-8")
    except UnicodeDecodeError:
        text = "".join(_readable_lines(chunk, parsed))
    if text.strip():
        parsed.texts[key].append(text)
    elif len(parsed.bad) == before:
        parsed.empty += 1


def _readable_lines(chunk: InputChunk, parsed: ParsedTexts) -> Iterator[str]:
    """Yield the lines that are UTF-8; the others are listed, each by its number."""
    for number, raw in enumerate(re.findall(rb"[^\n]*\n|[^\n]+", chunk.payload), start=chunk.first_line):
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            parsed.bad.append(BadLine(path=chunk.path, line=number, reason=_not_utf8(error)))


def _parse_lines(chunk: InputChunk, keys: Sequence[str], parsed: ParsedTexts) -> None:
    for number, raw in enumerate(chunk.payload.split(b"\n"), start=chunk.first_line):
        if not raw.strip():
            continue
        values = _document(raw, keys)
        if isinstance(values, str):
            parsed.bad.append(BadLine(path=chunk.path, line=number, reason=values))
            continue
        for key, text in zip(keys, values, strict=True):
            if text:
                parsed.texts[key].append(text)
            else:
                parsed.empty += 1


def _document(raw: bytes, keys: Sequence[str]) -> list[str] | str:
    """Return the texts of one JSON line, or the reason why it has none."""
    try:
        record: Any = json.loads(raw)
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except (ValueError, RecursionError) as error:  # Python refuses numbers of thousands of digits by a ValueError
        return f"is not JSON ({error})"
    if not isinstance(record, dict):
        return f'is a JSON {type(record).__name__}, not an object like {{"text": "..."}}'
    return _values(record, keys)


def _values(record: dict[str, Any], keys: Sequence[str]) -> list[str] | str:
    for key in keys:
        if key not in record:
            return f"has no key {key!r} (it has {', '.join(sorted(record)) or 'none'}; see --json-keys)"
        if not isinstance(record[key], str):
            return f"has a {type(record[key]).__name__} under {key!r}, not text"
        if not _encodable(record[key]):
            return f"has half a surrogate pair under {key!r}, which is not text"
    return [record[key] for key in keys]


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _not_utf8(error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"is not UTF-8 (byte 0x{byte:02x}); convert the file, or decompress it if it is compressed"


class Encoder:
    """Converts batches to token ids.

    Text that spells a special token is encoded as text, so that a corpus cannot forge an end of document.
    """

    def __init__(self, tokenizer_json: str, options: EncodeOptions) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._tokenizer.encode_special_tokens = True
        self._options = options

    def __call__(self, batch: DocumentBatch) -> BatchResult:
        """Encode all documents of `batch`."""
        parsed = parse(batch.chunks, self._options.keys)
        encode = self._encode if self._options.sentences_of is None else self._encode_sentences
        encoded = {key: encode(parsed.texts[key]) for key in self._options.keys}
        empty = parsed.empty + sum(texts.empty for texts in encoded.values())
        return BatchResult(encoded=encoded, bad=tuple(parsed.bad), empty=empty)

    def _encode(self, texts: list[str]) -> EncodedTexts:
        lengths, ids = self._joined(list(self._rows(texts)))
        return EncodedTexts(lengths=lengths, ids=ids)

    def _joined(self, rows: Sequence[list[int]]) -> tuple[npt.NDArray[np.int32], bytes]:
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        ids = np.fromiter((token for row in rows for token in row), dtype=self._options.dtype, count=int(lengths.sum()))
        return lengths, ids.tobytes()

    def _encode_sentences(self, texts: list[str]) -> EncodedTexts:
        documents = [self._sentences(text) for text in texts]
        found = [sentence for document in documents for sentence in document]
        encodings = iter(self._tokenizer.encode_batch_fast(found, add_special_tokens=False))
        rows: list[list[int]] = []
        counts: list[int] = []
        for document in documents:
            own = [ids for ids in (next(encodings).ids for _ in document) if ids]
            if not own:
                continue
            if self._options.eod is not None:
                own[-1].append(self._options.eod)
            rows += own
            counts.append(len(own))
        lengths, ids = self._joined(rows)
        return EncodedTexts(
            lengths=lengths, ids=ids, sequences=np.array(counts, dtype=np.int32), empty=len(texts) - len(counts)
        )

    def _sentences(self, text: str) -> list[str]:
        found = (sentence.strip() for sentence in sentencex.segment(self._options.sentences_of, text))
        return [sentence for sentence in found if sentence]

    def _rows(self, texts: list[str]) -> Iterator[list[int]]:
        for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            row: list[int] = encoding.ids
            yield row if self._options.eod is None else [*row, self._options.eod]
