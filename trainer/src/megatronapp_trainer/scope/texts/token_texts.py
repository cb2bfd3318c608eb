"""Probe texts as tokens and as microbatches of the form that training has.

B samples of a microbatch, S sequence.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence

import torch

from megatronapp_common.scope.probe_limits import MAX_TEXTS, MAX_TOKENS
from megatronapp_trainer.config import TrainerConfig
from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.microbatches import HostMicrobatch
from megatronapp_trainer.errors import UsageError

FLAG = "--scope-probe-texts"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenText:
    """A text and its tokens."""

    text: str
    tokens: tuple[int, ...]


def read_texts(config: TrainerConfig) -> tuple[tuple[TokenText, ...], tokenizers.Tokenizer]:
    """Return the probe texts of the flag, and the tokenizer that made their tokens.

    Raises:
        UsageError: the flag is no list of texts, there is no tokenizer, or a text has no tokens or too many.
        DataError: the tokenizer's files cannot be read.
    """
    data, most = config.data, min(MAX_TOKENS, config.model.seq_length)
    texts = _listed(config.control.scope_probe_texts or "[]")
    if data.tokenizer_file is None and data.vocab_file is None:
        raise UsageError(f"{FLAG} needs a tokenizer; give --tokenizer-file, or --vocab-file and --merge-file")
    tokenizer = tokenizers.load(
        vocab_file=data.vocab_file, merge_file=data.merge_file, tokenizer_file=data.tokenizer_file
    )
    found = []
    for place, text in enumerate(texts):
        tokens = tuple(tokenizer.tokenize(text))
        if not 1 <= len(tokens) <= most:
            raise UsageError(f"{FLAG}: text {place} has {len(tokens)} tokens; give texts of 1 to {most}")
        if data.vocab_size is not None and max(tokens) >= data.vocab_size:
            raise UsageError(f"{FLAG}: text {place} has tokens beyond --vocab-size {data.vocab_size}")
        found.append(TokenText(text=text, tokens=tokens))
    return tuple(found), tokenizer


def count_texts(config: TrainerConfig) -> int:
    """Return the number of probe texts. Raises UsageError."""
    return len(_listed(config.control.scope_probe_texts or "[]"))


def _listed(flag: str) -> list[str]:
    try:
        texts = json.loads(flag)
    except json.JSONDecodeError as error:
        raise UsageError(f"{FLAG}: not JSON: {error}; give a list of texts") from error
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{FLAG}: give a JSON list of texts, as '[\"The whale\"]'")
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise UsageError(f"{FLAG}: {len(texts)} texts; give 1 to {MAX_TEXTS}")
    return texts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Division of the texts into rounds of microbatches, of which schedules run no more than in an evaluation."""

    microbatches: int
    rounds: int

    @classmethod
    def of(cls, texts: int, *, micro_batch_size: int, usual: int, multiple: int) -> "Rounds":
        """Return the fewest rounds.

        Args:
            texts: number of texts.
            micro_batch_size: texts of a microbatch.
            usual: microbatches of an evaluation.
            multiple: number of which the microbatches of a round are a multiple; interleaved schedules need it.
        """
        needed = math.ceil(texts / micro_batch_size)
        microbatches = min(usual, math.ceil(needed / multiple) * multiple)
        return cls(microbatches=microbatches, rounds=math.ceil(needed / microbatches))

    def batches(self, config: TrainerConfig, texts: Sequence[TokenText]) -> Iterator[HostMicrobatch]:
        """Yield the microbatches of all rounds; the last texts of all are repeated to fill them."""
        size, length = config.training.micro_batch_size, config.model.seq_length
        rows = [_padded(text.tokens, length) for text in texts]
        filled = itertools.chain(rows, itertools.repeat(rows[-1]))
        for _ in range(self.microbatches * self.rounds):
            tokens = torch.stack(list(itertools.islice(filled, size)))
            yield HostMicrobatch(
                tokens=tokens,
                labels=tokens.roll(-1, 1),
                loss_mask=torch.ones(size, length),
                position_ids=torch.arange(length).expand(size, -1),
            )


def _padded(tokens: Sequence[int], length: int) -> torch.Tensor:
    """Return int64 [S]; later tokens change nothing of the earlier ones, as attention is causal."""
    return torch.nn.functional.pad(torch.tensor(tokens, dtype=torch.int64), (0, length - len(tokens)))
