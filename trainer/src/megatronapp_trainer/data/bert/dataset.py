"""megatron-core's dataset of masked texts, reading its tokens as the flags say, and several times as fast."""

import bisect
from typing import Any

import numpy as np
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset

_CONTINUATION = "##"


class MaskedTextDataset(BERTMaskedWordPieceDataset):  # type: ignore[misc] # megatron-core carries no types
    """Samples of one or two texts of a document, with whole words masked.

    A sample is a function of its number and the seed, so that threads may read in any order.
    """

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:  # noqa: ANN401 - untyped library
        """Open the token files, mapped or read as `--no-mmap-bin-files` says."""
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    def _create_masked_lm_predictions(
        self, token_ids: list[int], target_sequence_length: int, numpy_random_state: np.random.RandomState
    ) -> tuple[list[int], list[int], list[int], list[Any], list[Any]]:
        """Mask runs of whole words, with the draws of megatron-core's method of this name, and so with its result.

        That one builds lists of all runs of words that it may need, which takes most of the time of a sample. Returns
        masked tokens, and positions and labels in order; boundaries and spans, which BERT has no use for, are empty.
        """
        masking = self.config
        positions, bounds = self._maskable(np.asarray(token_ids))
        count = len(bounds) - 1
        probability = masking.masking_probability
        most = min(probability * target_sequence_length, max(1, round(len(token_ids) * probability)))
        chances = _cumulative_probabilities(masking.masking_max_ngram)
        order = np.arange(count)
        numpy_random_state.shuffle(order)
        tokens = list(token_ids)
        labels: dict[int, int] = {}
        for first in order.tolist():
            if len(labels) >= most:
                break
            length = 1 + bisect.bisect_right(chances, numpy_random_state.random_sample())
            remaining = most - len(labels)
            while length and bounds[min(first + length, count)] - bounds[first] > remaining:
                length -= 1
            run = positions[bounds[first] : bounds[min(first + length, count)]]
            if any(position in labels for position in run):
                continue
            for position in run:
                labels[position] = token_ids[position]
                replacement = self._get_token_mask(numpy_random_state)
                if replacement is not None:
                    tokens[position] = replacement
        masked = sorted(labels)
        return tokens, masked, [labels[position] for position in masked], [], []

    def _maskable(self, tokens: Any) -> tuple[list[int], list[int]]:  # noqa: ANN401 - array of ids
        """Return the positions of all tokens that may be masked, and where among them each word begins, and the end.

        A continuation belongs to the word before it, also if a text ends between them.
        """
        tokenizer = self.config.tokenizer
        positions = np.flatnonzero((tokens != tokenizer.cls) & (tokens != tokenizer.sep))
        begins = np.fromiter(
            (not tokenizer.inv_vocab[token].startswith(_CONTINUATION) for token in tokens[positions].tolist()),
            dtype=bool,
            count=len(positions),
        )
        begins[:1] = True
        return positions.tolist(), [*np.flatnonzero(begins).tolist(), len(positions)]


def _cumulative_probabilities(longest: int) -> list[float]:
    """Return the probabilities of runs of up to 1, 2, ... words, each in inverse proportion to its length.

    In the arithmetic of megatron-core and of numpy's `choice`, to the last bit.
    """
    weights = 1.0 / (np.arange(longest, dtype=np.int64) + 1)
    weights = weights / weights.sum(keepdims=True)
    weights = weights / weights.sum(keepdims=True)
    cumulative = weights.cumsum()
    return list((cumulative / cumulative[-1]).tolist())
