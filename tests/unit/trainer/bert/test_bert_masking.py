"""Masked words are those that megatron-core's own method masks, drawn from the same random numbers."""

import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.torch

VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh"))
CLS, SEP, MASK = 2, 3, 4


@pytest.fixture(scope="module")
def dataset_type() -> Any:
    from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports

    with silence_megatron_imports():
        from megatronapp_trainer.data.bert.dataset import MaskedTextDataset
    return MaskedTextDataset


def dataset_of(kind: Any, probability: float, longest: int) -> Any:
    """A dataset without files."""
    dataset = kind.__new__(kind)
    tokenizer = types.SimpleNamespace(cls=CLS, sep=SEP, mask=MASK, inv_vocab=dict(enumerate(VOCABULARY)))
    dataset.token_lookup = list(tokenizer.inv_vocab)
    dataset.config = types.SimpleNamespace(
        tokenizer=tokenizer,
        masking_probability=probability,
        masking_max_ngram=longest,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
    )
    return dataset


TEXT = st.lists(st.integers(5, len(VOCABULARY) - 1), min_size=1, max_size=40)


@given(
    first=TEXT,
    second=TEXT,
    probability=st.floats(0.05, 0.9),
    longest=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_masked_tokens_are_those_of_megatron(
    dataset_type: Any, *, first: list[int], second: list[int], probability: float, longest: int, seed: int
) -> None:
    tokens = [CLS, *first, SEP, *second, SEP]
    dataset = dataset_of(dataset_type, probability, longest)
    arguments = (tokens, len(first) + len(second))
    ours = dataset._create_masked_lm_predictions(*arguments, np.random.RandomState(seed))
    theirs = super(dataset_type, dataset)._create_masked_lm_predictions(*arguments, np.random.RandomState(seed))
    assert ours[:3] == theirs[:3]
    assert tokens == [CLS, *first, SEP, *second, SEP]
