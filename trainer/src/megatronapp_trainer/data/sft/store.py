"""Tokens of all conversations of a file, in files of the index cache that ranks map."""

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import pathlib

import numpy as np
import numpy.typing as npt

from megatronapp_trainer.data.index_cache import staged
from megatronapp_trainer.data.sft.answers import AnswerTokenizer, TokenizedConversation, render
from megatronapp_trainer.data.sft.conversations import read_conversations
from megatronapp_trainer.errors import DataError

log = logging.getLogger(__name__)
_TOGETHER = 512
"""Conversations that are tokenized at once."""
_VERSION = 1
NO_ANSWER = 2**62
"""Place beyond each sample."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConversationStore:
    """Tokenized conversations of a file, n in number."""

    tokens: npt.NDArray[np.int32]
    """Tokens of all conversations in a row."""
    is_answer: npt.NDArray[np.uint8]
    """For each token 1 if it belongs to an answer."""
    bounds: npt.NDArray[np.int64]
    """Bounds of the conversations, [n + 1]."""
    first_answers: npt.NDArray[np.int64]
    """Place of the first token of an answer that another one precedes, [n]."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> TokenizedConversation:
        first, last = int(self.bounds[index]), int(self.bounds[index + 1])
        return TokenizedConversation(self.tokens[first:last], self.is_answer[first:last].astype(np.bool_))


def open_store(path: str, tokenizer: AnswerTokenizer, cache_path: str | None) -> ConversationStore:
    """Map the tokens of the conversations of a file, and write them first if they are not in the cache.

    Raises:
        DataError: the file or a conversation cannot be used.
        StorageError: the cache cannot be written.
    """
    root = pathlib.Path(cache_path) if cache_path is not None else pathlib.Path(path).parent / "index-cache"
    cache = root / _identity(path, tokenizer)
    names = ("tokens.bin", "answers.bin", "bounds.npy", "first.npy")
    if not all((cache / name).is_file() for name in names):
        with staged(cache) as stage:
            for name in names:  # links to what a builder left or moves there now must not be written through
                (stage / name).unlink(missing_ok=True)
            _write(path, tokenizer, stage)
    return ConversationStore(
        np.memmap(cache / "tokens.bin", dtype=np.int32, mode="r"),
        np.memmap(cache / "answers.bin", dtype=np.uint8, mode="r"),
        np.load(cache / "bounds.npy"),
        np.load(cache / "first.npy"),
    )


def _identity(path: str, tokenizer: AnswerTokenizer) -> str:
    stat = os.stat(path)
    template = tokenizer.template
    facts = [
        _VERSION,
        os.path.abspath(path),
        stat.st_size,
        stat.st_mtime_ns,
        tokenizer.tokenizer.digest,
        tokenizer.end,
        template.text,
        dict(template.tokens),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _write(path: str, tokenizer: AnswerTokenizer, stage: pathlib.Path) -> None:
    bounds, firsts = [0], []
    conversations = read_conversations(path)
    with (stage / "tokens.bin").open("wb") as tokens, (stage / "answers.bin").open("wb") as answers:
        while batch := list(itertools.islice(conversations, _TOGETHER)):
            rendered = []
            for line, conversation in batch:
                try:
                    rendered.append(render(conversation, tokenizer.template))
                except DataError as error:
                    raise DataError(f"{path}, line {line}: {error}") from error
            for part in tokenizer.tokenize(rendered):
                tokens.write(part.tokens.tobytes())
                answers.write(part.is_answer.astype(np.uint8).tobytes())
                bounds.append(bounds[-1] + len(part.tokens))
                places = np.flatnonzero(part.is_answer[1:])
                firsts.append(int(places[0]) + 1 if len(places) else NO_ANSWER)
    if len(bounds) == 1:
        raise DataError(f"{path} holds no conversation")
    np.save(stage / "bounds.npy", np.array(bounds, dtype=np.int64))
    np.save(stage / "first.npy", np.array(firsts, dtype=np.int64))
    log.info("%s: %d conversations of %d tokens", path, len(bounds) - 1, bounds[-1])
