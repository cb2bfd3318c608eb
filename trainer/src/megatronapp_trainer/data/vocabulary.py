"""Vocabulary of a run: its size, and the token that ends a document."""

from collections import OrderedDict
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
        vocab_file=config.vocab_file, merge_file=config.merge_file, tokenizer_file=config.tokenizer_file
    )
    if config.vocab_size is not None and config.vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"--vocab-size {config.vocab_size} is below the tokenizer's {tokenizer.vocab_size} tokens; write "
            f"--vocab-size {tokenizer.vocab_size}, or omit it to take the tokenizer's"
        )
    return Vocabulary(
        vocab_size=config.vocab_size or tokenizer.vocab_size,
        eod=tokenizer.eod if needs_eod else _NO_TOKEN,
        digest=tokenizer.digest,
    )
