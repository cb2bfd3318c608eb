"""Text tokenizers of the Hugging Face `tokenizers` library, with the interface of megatron-core's datasets.

Nothing here uses a network: a tokenizer is a pair of GPT-2 files, a tokenizer.json, or trained from local text.
"""

import functools
import hashlib
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatronapp_trainer.config.data import WORDPIECE_TYPES
from megatronapp_trainer.data.tokenizer_folder import CONFIG, special_tokens
from megatronapp_trainer.errors import DataError

WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END_OF_DOCUMENT = "<|endoftext|>"
_END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
_BYTE_VALUES = 256


class Tokenizer:
    """A `tokenizers.Tokenizer` for megatron-core's GPTDataset: sizes, end-of-document id, a stable identity."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, folder: pathlib.Path | None = None, marks_special: bool = True
    ) -> None:
        """Take a tokenizer of the library.

        Args:
            backend: that tokenizer, which loses its truncation and padding.
            folder: of its files, next to which others may name the end-of-document token.
            marks_special: special tokens are marked as such, as in a tokenizer.json.
        """
        self._folder, self._marks_special = folder, marks_special
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        if not self._vocab:
            raise DataError("the tokenizer's vocabulary is empty; train one with --train-tokenizer --vocab-size N")
        self.unique_identifiers: OrderedDict[str, str] = OrderedDict(
            {"class": type(self).__name__, "digest": hashlib.sha256(backend.to_str().encode()).hexdigest()}
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        return self._backend

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the whole tokenizer in hex: equal digests give equal ids."""
        return self.unique_identifiers["digest"]

    @property
    def vocab(self) -> dict[str, int]:
        """Return the id of each token."""
        return self._vocab

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest id, so that every id indexes an embedding of this many rows."""
        return max(self._vocab.values()) + 1

    @functools.cached_property
    def eod(self) -> int:
        """Return the id of the end-of-document token: the `eos_token` of the files next to the tokenizer; without
        one, a special token with a known name.

        Raises DataError if the tokenizer has none, or several.
        """
        declared = {} if self._folder is None else special_tokens(self._folder)
        if (name := declared.get("eos_token")) is not None:
            if name not in self._vocab:
                raise DataError(
                    f"eos_token {name!r} of {self._folder} is no token of the tokenizer there; copy its files again"
                )
            return self._vocab[name]
        known = [name for name in _END_OF_DOCUMENT_NAMES if name in self._special_names()]
        advice = f'write {{"eos_token": "..."}} into a {CONFIG} next to it'
        if not known:
            raise DataError(
                f"the tokenizer has no end-of-document token (no special token is {' or '.join(_END_OF_DOCUMENT_NAMES)}"
                f"); if another one ends documents, {advice}; otherwise use a tokenizer that has one, or omit "
                "--append-eod, --eod-mask-loss and the --reset-* flags"
            )
        if len(known) > 1 and self._marks_special:
            raise DataError(f"the tokenizer has several tokens that may end a document: {', '.join(known)}; {advice}")
        return self._vocab[known[0]]

    @property
    def eod_by_name(self) -> int | None:
        """Return the id that earlier releases took for the end of a document: by names alone, special or not."""
        return next((self._vocab[name] for name in _END_OF_DOCUMENT_NAMES if name in self._vocab), None)

    def _special_names(self) -> Collection[str]:
        """Return the tokens that may be special: where none is marked, all."""
        if not self._marks_special:
            return self._vocab
        return {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, without any special token added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids`, special tokens included unless `skip_special`."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Return the start of each token of `text` in characters; `ids` must be the tokens of `text`."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        if encoding.ids != list(ids):
            raise DataError("these ids are not the tokens of this text")
        return [start for start, _ in encoding.offsets]


def load_gpt2(vocab_file: pathlib.Path, merge_file: pathlib.Path) -> Tokenizer:
    """Load a byte-level BPE from GPT-2's `vocab.json` and `merges.txt`."""

    def read() -> tokenizers.Tokenizer:
        backend: tokenizers.Tokenizer = tokenizers.ByteLevelBPETokenizer(str(vocab_file), str(merge_file))._tokenizer
        return backend

    return _load(read, vocab_file, merge_file, marks_special=False)


def load_wordpiece(vocab_file: pathlib.Path, *, lowercase: bool) -> Tokenizer:
    """Load BERT's WordPiece from its `vocab.txt`; `lowercase`: text is lower-cased, and accents are stripped."""

    def read() -> tokenizers.Tokenizer:
        vocabulary = models.WordPiece.read_file(str(vocab_file))
        missing = [token for token in WORDPIECE_SPECIAL if token not in vocabulary]
        if missing:
            raise ValueError(f"it has no {' '.join(missing)}")
        backend: tokenizers.Tokenizer = tokenizers.BertWordPieceTokenizer(vocabulary, lowercase=lowercase)._tokenizer
        return backend

    return _load(read, vocab_file, marks_special=False)


def load_file(tokenizer_file: pathlib.Path) -> Tokenizer:
    """Load a tokenizer.json of the `tokenizers` library, given by its path or that of its directory."""
    path = tokenizer_file / "tokenizer.json" if tokenizer_file.is_dir() else tokenizer_file
    return _load(lambda: tokenizers.Tokenizer.from_file(str(path)), path)


def _load(read: Callable[[], tokenizers.Tokenizer], *files: pathlib.Path, marks_special: bool = True) -> Tokenizer:
    names = " and ".join(str(path) for path in files)
    for path in files:
        if not path.is_file():
            raise DataError(f"tokenizer file {path} does not exist; give the path of an existing file")
    try:
        backend = read()
    except Exception as error:  # the Rust library raises bare Exception
        raise DataError(
            f"{names} cannot be read as a tokenizer ({error}); is it truncated, or in another format?"
        ) from error
    return Tokenizer(backend, folder=files[0].parent, marks_special=marks_special)


def load(
    *,
    vocab_file: str | None,
    merge_file: str | None,
    tokenizer_file: str | None,
    tokenizer_type: str | None = None,
) -> Tokenizer:
    """Load the tokenizer of the flags: a pair of GPT-2 files, one tokenizer.json, or a vocab.txt of WordPiece."""
    if tokenizer_type in WORDPIECE_TYPES:
        if vocab_file is None or merge_file is not None or tokenizer_file is not None:
            raise DataError(f"--tokenizer-type {tokenizer_type} has one file: give --vocab-file vocab.txt alone")
        return load_wordpiece(pathlib.Path(vocab_file), lowercase=tokenizer_type == WORDPIECE_TYPES[0])
    if tokenizer_file is not None and vocab_file is None and merge_file is None:
        return load_file(pathlib.Path(tokenizer_file))
    if vocab_file is not None and merge_file is not None and tokenizer_file is None:
        return load_gpt2(pathlib.Path(vocab_file), pathlib.Path(merge_file))
    raise DataError("name one tokenizer: either a tokenizer.json, or --vocab-file together with --merge-file")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE (as GPT-2's) from `texts`; id 0 is `<|endoftext|>`.

    The same texts in the same order give the same tokenizer. `vocab_size` includes the 256 byte values and the special
    token.
    """
    least = _BYTE_VALUES + 1
    if vocab_size < least:
        raise DataError(f"--vocab-size {vocab_size} is too small: byte-level BPE needs at least {least}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend)
