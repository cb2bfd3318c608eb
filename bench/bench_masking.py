"""Time of masking the tokens of a BERT sample, against megatron-core's method with the same draws.

    python bench/bench_masking.py [--tokens 512] [--blocks 15]

Blocks of both alternate; the ratio is that of their medians. Every second token begins a word.
"""

import argparse
import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np

SAMPLES = 20
"""Samples of a block."""
CLS, SEP, MASK, FIRST, VOCABULARY = 101, 102, 103, 104, 30522


def dataset_of(kind: Any) -> Any:  # noqa: ANN401 - class of megatron-core
    """Return a dataset without files, with the settings of a training."""
    dataset = kind.__new__(kind)
    names = {number: f"##{number}" if number % 2 else str(number) for number in range(VOCABULARY)}
    dataset.token_lookup = list(names)
    dataset.config = types.SimpleNamespace(
        tokenizer=types.SimpleNamespace(cls=CLS, sep=SEP, mask=MASK, inv_vocab=names),
        masking_probability=0.15,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
    )
    return dataset


def block_ms(mask: Callable[..., Any], samples: list[list[int]]) -> float:
    """Return the processor time of a sample in milliseconds."""
    began = time.process_time()
    for number, tokens in enumerate(samples):
        mask(tokens, len(tokens) - 3, np.random.RandomState(number))
    return (time.process_time() - began) * 1e3 / len(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=15)
    arguments = parser.parse_args()
    from megatronapp_trainer.data.bert.dataset import MaskedTextDataset

    source = np.random.RandomState(1)
    half = (arguments.tokens - 3) // 2
    texts = source.randint(FIRST, VOCABULARY, (SAMPLES, 2, half)).tolist()
    samples = [[CLS, *first, SEP, *second, SEP] for first, second in texts]
    dataset = dataset_of(MaskedTextDataset)
    ours, theirs = (
        dataset._create_masked_lm_predictions,
        super(MaskedTextDataset, dataset)._create_masked_lm_predictions,
    )
    times = [(block_ms(ours, samples), block_ms(theirs, samples)) for _ in range(arguments.blocks)]
    own, anchor = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"ours {own:.2f} ms, megatron-core {anchor:.2f} ms of a sample of {arguments.tokens} tokens: {own / anchor:.2f}"
    )


if __name__ == "__main__":
    main()
