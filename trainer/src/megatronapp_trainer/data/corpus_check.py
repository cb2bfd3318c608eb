"""Check of a .bin/.idx pair before megatron-core reads it, so that damage is reported instead of hit.

Layout of an .idx file: 9 bytes "MMIDIDX\\0\\0", u64 version 1, u8 code of the token type, u64 sequences n, u64
boundaries m, then n int32 lengths, n int64 byte offsets and m int64 document boundaries.
"""

import json
import logging
import pathlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatronapp_trainer.errors import DataError

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
LONGEST_SENTENCE = 512
"""Tokens of a sentence above which megatron-core skips its document for BERT."""
SPECIAL_IN_SAMPLE = 3
"""Tokens of a sample of BERT that are none of its text."""
_FLAGS_OF_ENDS = "--eod-mask-loss, --reset-position-ids and --reset-attention-mask"
_WINDOW = 1 << 20
"""Tokens at both ends of a corpus that are read where its record does not say what it has."""
_SAMPLED_ENDS = 1000
_PREPARE_AGAIN = "prepare it again with `megatronapp data prepare ... --overwrite`"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFacts:
    """Facts of a whole corpus. `lengths` has one entry of tokens per sequence."""

    prefix: str
    lengths: npt.NDArray[np.int32]
    token_type: np.dtype[Any]

    @property
    def documents(self) -> int:
        """Return the number of sequences, each of which `data prepare` writes as one document."""
        return len(self.lengths)

    def tokens_beyond(self, length: int) -> tuple[int, int]:
        """Return the number of sequences of more than `length` tokens, and their tokens beyond it."""
        beyond = self.lengths[self.lengths > length].astype(np.int64) - length
        return len(beyond), int(beyond.sum())

    def tokens_between(self, first_fraction: float, last_fraction: float) -> tuple[int, int]:
        """Return documents and tokens of the part of the corpus between two fractions, split as megatron-core splits
        it.
        """
        first, last = (round(fraction * float(self.documents)) for fraction in (first_fraction, last_fraction))
        return last - first, int(self.lengths[first:last].sum(dtype=np.int64))


def inspect_corpus(prefix: str) -> CorpusFacts:
    """Read the facts of a corpus.

    Raises:
        DataError: a file is missing, truncated, or not in Megatron's format; the message says what to do.
    """
    index, data = pathlib.Path(prefix + ".idx"), pathlib.Path(prefix + ".bin")
    for path in (index, data):
        if not path.is_file():
            raise DataError(f"{path} does not exist; {_did_you_mean(prefix)}")
    token_type, lengths = _read_index(index)
    stored = data.stat().st_size
    expected = int(lengths.sum(dtype=np.int64)) * token_type.itemsize
    if stored != expected:
        raise DataError(
            f"{data} has {stored} bytes where {index.name} requires {expected}: one of them is truncated "
            f"or from another run; {_PREPARE_AGAIN}"
        )
    if expected == 0:
        raise DataError(f"{data} is empty; {_PREPARE_AGAIN}")
    return CorpusFacts(prefix=prefix, lengths=lengths, token_type=token_type)


def _did_you_mean(prefix: str) -> str:
    if prefix.endswith((".bin", ".idx")):
        return f"give the prefix without its ending: {prefix[:-4]}"
    folder = pathlib.Path(prefix).parent
    known = sorted(str(path)[: -len(".idx")] for path in folder.glob("*.idx")) if folder.is_dir() else []
    if known:
        return f"{folder} holds {', '.join(known[:5])}"
    return "make it with `megatronapp data prepare`, and give the prefix as it prints it (... _text_document)"


def _read_index(path: pathlib.Path) -> tuple[np.dtype[Any], npt.NDArray[np.int32]]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise DataError(f"{path} is only {size} bytes long; {_PREPARE_AGAIN}")
        magic, version, code, sequences, documents = _HEADER.unpack(head)
        if magic != _MAGIC or version != 1 or code not in _TOKEN_TYPES:
            raise DataError(f"{path} is not an index of token files (its first bytes are wrong); {_PREPARE_AGAIN}")
        expected = _HEADER.size + sequences * (4 + 8) + documents * 8
        if size != expected:
            raise DataError(f"{path} is {size} bytes long where its header requires {expected}; {_PREPARE_AGAIN}")
        lengths = np.fromfile(stream, dtype=np.int32, count=sequences)
    if sequences and int(lengths.min()) < 0:
        raise DataError(f"{path} has a sequence of negative length; {_PREPARE_AGAIN}")
    return np.dtype(_TOKEN_TYPES[code]), lengths


def sentences_of_documents(corpus: CorpusFacts) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return of each document the number of its sequences, and the tokens of the longest one (0 without any)."""
    with pathlib.Path(corpus.prefix + ".idx").open("rb") as stream:
        _, _, _, sequences, boundaries = _HEADER.unpack(stream.read(_HEADER.size))
        stream.seek(sequences * (4 + 8), 1)
        starts = np.fromfile(stream, dtype=np.int64, count=boundaries)
    if not boundaries or starts[0] != 0 or starts[-1] != sequences or (np.diff(starts) < 0).any():
        raise DataError(f"{corpus.prefix}.idx has boundaries of documents beyond its sequences; {_PREPARE_AGAIN}")
    counts = np.diff(starts)
    longest = np.zeros(len(counts), dtype=np.int64)
    filled = counts > 0
    if filled.any():
        longest[filled] = np.maximum.reduceat(corpus.lengths, starts[:-1][filled])
    return counts, longest


def check_vocabulary(
    prefix: str,
    *,
    vocab_size: int,
    digest: str | None,
    token_type: np.dtype[Any],
    flags: str = "--tokenizer-file, or --vocab-file and --merge-file",
) -> None:
    """Compare a corpus with the tokenizer of the run, which `flags` give.

    The digest that `data prepare` stored next to the corpus is exact; without it the ends of the corpus are read.

    Raises:
        DataError: the corpus was made with another tokenizer, or has ids for which the model has no embedding.
    """
    note = _note(prefix)
    if note is not None:
        if digest is not None and note.get("tokenizer_digest") != digest:
            raise DataError(
                f"{prefix}.bin was tokenised with another tokenizer than the one given; give that one "
                f"({flags}), or {_PREPARE_AGAIN}"
            )
        largest = int(note.get("vocab_size", 0)) - 1
    else:
        largest = _largest_sampled(prefix, token_type)
    if largest >= vocab_size:
        raise DataError(
            f"{prefix}.bin holds token ids up to {largest}, but the vocabulary has {vocab_size}; "
            "give the tokenizer it was made with, or a larger --vocab-size"
        )


def check_ends(prefix: str, *, eod: int, lengths: npt.NDArray[np.int32], token_type: np.dtype[Any]) -> None:
    """Compare the ends of documents of a corpus with the token by which a run finds them.

    The record that `data prepare` stored next to the corpus is exact; without it the ends of sequences and of the
    corpus are read, and a warning is logged if none has the token.

    Raises:
        DataError: documents of the corpus end without a token, or with another one.
    """
    note = _note(prefix)
    if note is not None and "eod" in note:
        if note["eod"] == eod:
            return
        found = "no token that ends its documents" if note["eod"] is None else f"documents that end with {note['eod']}"
        raise DataError(
            f"{prefix}.bin has {found}, but {_FLAGS_OF_ENDS} look for token {eod}; prepare it again with `megatronapp "
            "data prepare ... --append-eod --overwrite` and the tokenizer of the run, or leave these flags out"
        )
    if not _has_sampled(prefix, eod, lengths, token_type):
        log.warning(
            "no document end (token %d) was found in %s.bin, so %s have no effect there; was it prepared "
            "without --append-eod?",
            eod,
            prefix,
            _FLAGS_OF_ENDS,
        )


def _has_sampled(prefix: str, eod: int, lengths: npt.NDArray[np.int32], token_type: np.dtype[Any]) -> bool:
    tokens = np.memmap(prefix + ".bin", dtype=token_type, mode="r")
    ends = np.cumsum(lengths, dtype=np.int64)[lengths > 0] - 1
    sampled = ends[:: max(1, len(ends) // _SAMPLED_ENDS)]
    return bool((tokens[sampled] == eod).any() or (tokens[:_WINDOW] == eod).any() or (tokens[-_WINDOW:] == eod).any())


def _note(prefix: str) -> dict[str, Any] | None:
    try:
        summary = json.loads(pathlib.Path(prefix + ".json").read_text(encoding="utf-8"))["summary"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return summary if isinstance(summary, dict) else None


def _largest_sampled(prefix: str, token_type: np.dtype[Any]) -> int:
    tokens = np.memmap(prefix + ".bin", dtype=token_type, mode="r")
    return max(int(tokens[:_WINDOW].max()), int(tokens[-_WINDOW:].max()))
