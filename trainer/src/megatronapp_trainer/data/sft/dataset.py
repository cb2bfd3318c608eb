"""Samples of packed conversations: each attends to itself alone, and the loss counts its answers."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatronapp_trainer.data.sft.answers import AnswerTokenizer, TokenizedConversation
from megatronapp_trainer.data.sft.form import ConversationForm
from megatronapp_trainer.data.sft.packing import packed_epochs
from megatronapp_trainer.data.sft.store import ConversationStore, open_store
from megatronapp_trainer.errors import DataError

log = logging.getLogger(__name__)


class PackedConversations:
    """Samples of conversations of several files; a sample is a function of its number and the seed."""

    def __init__(
        self,
        parts: Sequence[tuple[ConversationStore, int, int]],
        form: ConversationForm,
        *,
        samples: int | None,
        end: int,
    ) -> None:
        """Take the conversations [first, last) of each store.

        Args:
            parts: stores, and the range of each.
            form: length and seed of the samples.
            samples: number of samples that are needed at least; None: each conversation once.
            end: token that fills up samples.

        Raises:
            DataError: no conversation has an answer within a sample.
        """
        self._length, self._end = form.sequence_length, end
        self._stores = [store for store, _, _ in parts]
        numbers_in = [
            first + np.flatnonzero(store.first_answers[first:last] <= self._length) for store, first, last in parts
        ]
        self._store_of = np.repeat(np.arange(len(parts)), [len(numbers) for numbers in numbers_in])
        self._number_in = np.concatenate(numbers_in)
        sizes = [np.diff(store.bounds)[numbers] - 1 for (store, _, _), numbers in zip(parts, numbers_in, strict=True)]
        lengths = np.concatenate(sizes).tolist()
        without = sum(last - first for _, first, last in parts) - len(lengths)
        longer = sum(length > self._length for length in lengths)
        if not lengths:
            raise DataError(
                f"none of {without} conversations has an answer in its first {self._length} tokens; give a longer "
                "--seq-length, or other files"
            )
        if longer:
            log.warning("%d conversations are longer than --seq-length %d and are cut", longer, self._length)
        if without:
            log.warning("%d conversations are skipped: they have no answer within --seq-length", without)
        self._samples = packed_epochs(lengths, self._length, seed=form.seed, samples=samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return tokens, labels and position_ids int64 [length], and loss_mask float32 [length].

        Positions begin at 0 in each conversation, and in what fills up the sample.
        """
        packed = self._samples[index]
        return self._sample([self._stores[self._store_of[at]][int(self._number_in[at])] for at in packed])

    def _sample(self, conversations: Sequence[TokenizedConversation]) -> dict[str, Any]:
        length = self._length
        tokens = np.full(length, self._end, dtype=np.int64)
        labels = np.full(length, self._end, dtype=np.int64)
        mask = np.zeros(length, dtype=np.float32)
        positions = np.zeros(length, dtype=np.int64)
        first = 0
        for conversation in conversations:
            size = min(len(conversation.tokens) - 1, length - first)
            here = slice(first, first + size)
            tokens[here] = conversation.tokens[:size]
            labels[here] = conversation.tokens[1 : size + 1]
            mask[here] = conversation.is_answer[1 : size + 1]
            positions[here] = np.arange(size)
            first += size
        positions[first:] = np.arange(length - first)
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def build_conversations(
    prefixes: Sequence[str], fractions: tuple[float, float], form: ConversationForm, *, samples: int | None
) -> PackedConversations:
    """Build the samples of a split: of the conversations of each file those between two fractions.

    Raises:
        DataError: a file cannot be used, or the split has no conversation.
    """
    tokenizer = AnswerTokenizer(form.vocabulary, form.prompt_format)
    parts = []
    for path in prefixes:
        store = open_store(path, tokenizer, form.cache_path)
        first, last = (round(fraction * float(len(store))) for fraction in fractions)
        if first == last:
            raise DataError(
                f"a split has none of the {len(store)} conversations of {path}; give more conversations, another "
                "--split, or --eval-iters 0 for no evaluation"
            )
        parts.append((store, first, last))
    return PackedConversations(parts, form, samples=samples, end=tokenizer.end)
