"""Vocabulary of a run: its size, and the token that ends a document."""

import functools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from megatronapp_trainer.errors import DataError, UsageError

_NO_TOKEN = -2
"""Id of an absent token; not -1, megatron-core's "no padding token": its datasets would warn, on every rank, if both
were equal.
"""


class VocabularyConfig(Protocol):
    """Flags of the tokenizer; `config.DataConfig` has them."""

    @property
    def tokenizer_file(self) -> str | None: ...
    @property
    def vocab_file(self) -> str | None: ...
    @property
    def merge_file(self) -> str | None: ...
    @property
    def tokenizer_type(self) -> str | None: ...
    @property
    def is_wordpiece(self) -> bool: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def eod_mask_loss(self) -> bool: ...
    @property
    def reset_position_ids(self) -> bool: ...
    @property
    def reset_attention_mask(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokenizer for megatron-core's datasets. `eod` is below 0, no token, if no flag needs it."""

    vocab_size: int
    eod: int
    digest: str | None

    @property
    def unique_identifiers(self) -> "OrderedDict[str, object]":
        """Return the properties that the cached order of samples depends on."""
        return OrderedDict(vocab_size=self.vocab_size, digest=self.digest)


@dataclass(frozen=True, kw_only=True)
class MaskingVocabulary(Vocabulary):
    """WordPiece for megatron-core's datasets of masked tokens, which look up the parts of words and special tokens."""

    ids: Mapping[str, int]
    """Id of each token."""

    @functools.cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Return the token of each id, in the order of ids: random replacements are drawn by their place in it."""
        return {number: token for token, number in sorted(self.ids.items(), key=lambda entry: entry[1])}

    @property
    def pad(self) -> int:
        """Return the id of padding."""
        return self.ids["[PAD]"]

    @property
    def cls(self) -> int:
        """Return the id of the token that begins a sample."""
        return self.ids["[CLS]"]

    @property
    def sep(self) -> int:
        """Return the id of the token that ends a text."""
        return self.ids["[SEP]"]

    @property
    def mask(self) -> int:
        """Return the id that takes the place of a masked token."""
        return self.ids["[MASK]"]


def load_vocabulary(config: VocabularyConfig) -> Vocabulary:
    """Load the tokenizer's files, or take `--vocab-size` alone.

    Raises:
        UsageError: neither is given, or a flag needs the end of documents and no tokenizer gives its id.
        DataError: a file is missing or corrupt, or has more tokens than `--vocab-size`.
    """
    needs_eod = config.eod_mask_loss or config.reset_position_ids or config.reset_attention_mask
    if config.tokenizer_file is None and config.vocab_file is None:
        if config.vocab_size is None:
            raise UsageError("give --tokenizer-file, or --vocab-file and --merge-file, or --vocab-size")
        if needs_eod:
            raise UsageError("--eod-mask-loss and --reset-... need the end of documents: give the tokenizer's files")
        return Vocabulary(vocab_size=config.vocab_size, eod=_NO_TOKEN, digest=None)
    from megatronapp_trainer.data import tokenizer as tokenizers

    tokenizer = tokenizers.load(
        vocab_file=config.vocab_file,
        merge_file=config.merge_file,
        tokenizer_file=config.tokenizer_file,
        tokenizer_type=config.tokenizer_type,
    )
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"--vocab-size {config.vocab_size} is below the tokenizer's {tokenizer.vocab_size} tokens; write "
            f"--vocab-size {tokenizer.vocab_size}, or omit it to take the tokenizer's"
        )
    size = config.vocab_size or tokenizer.vocab_size
    if config.is_wordpiece:
        return _masking_vocabulary(size, tokenizer.digest, tokenizer.vocab)
    return Vocabulary(vocab_size=size, eod=tokenizer.eod if needs_eod else _NO_TOKEN, digest=tokenizer.digest)


def _masking_vocabulary(size: int, digest: str, ids: Mapping[str, int]) -> MaskingVocabulary:
    """Return the vocabulary of a vocab.txt. Raises DataError if its first line is not [PAD].

    megatron-core's dataset takes 0 for padding in token types and masks alike.
    """
    if ids["[PAD]"] != 0:
        raise DataError(f"[PAD] is line {ids['[PAD]'] + 1} of the vocab.txt; it must be the first one")
    return MaskingVocabulary(vocab_size=size, eod=_NO_TOKEN, digest=digest, ids=ids)
