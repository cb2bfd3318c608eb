"""Mock data of BERT: each sample is a function of its number, with consistent masks."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.config import parse
from megatronapp_trainer.parallel.layout import Layout

pytestmark = pytest.mark.torch

MODEL = (
    "--model-type bert --num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --train-iters 1 --mock-data"
)


def config_of(length: int, vocab_size: int, more: str = "") -> Any:
    return parse(f"{MODEL} --seq-length {length} --vocab-size {vocab_size} {more}".split())


@given(st.integers(8, 40), st.integers(16, 50), st.integers(0, 10_000))
def test_a_sample_holds_two_texts_with_masked_tokens(length: int, vocab_size: int, number: int) -> None:
    from megatronapp_trainer.data.bert.mock_data import CLS, MASK, SEP, mock_pair

    sample = mock_pair(str(number), config_of(length, vocab_size))
    tokens, mask, padding = sample["tokens"], sample["loss_mask"], sample["padding_mask"]
    used = int(padding.sum())
    assert {len(values) for name, values in sample.items() if name != "swapped"} == {length}  # type: ignore[arg-type]
    assert padding.tolist() == [1] * used + [0] * (length - used)
    assert not sample["tokens"][used:].any()
    ends = (tokens == SEP).nonzero().flatten().tolist()
    assert int(tokens[0]) == CLS and len(ends) == 2 and ends[1] == used - 1
    assert sample["token_types"][:used].tolist() == [0] * (ends[0] + 1) + [1] * (used - ends[0] - 1)
    assert not mask[[0, *ends]].any()
    assert not (sample["labels"] * (1 - mask)).any()
    assert ((tokens == MASK) <= (mask == 1)).all()
    assert ((tokens == sample["labels"]) | (tokens == MASK) | (mask == 0)).all()
    assert int(tokens.max()) < vocab_size


def test_a_sample_without_sentence_order_is_a_single_text() -> None:
    from megatronapp_trainer.data.bert.mock_data import SEP, mock_pair

    config = config_of(16, 32, "--bert-no-binary-head")
    for number in range(8):
        sample = mock_pair(str(number), config)
        assert int((sample["tokens"] == SEP).sum()) == 1
        assert not sample["token_types"].any()
        assert not sample["swapped"].any()


def test_swapped_texts_change_places() -> None:
    from megatronapp_trainer.data.bert.mock_data import mock_pair

    found = [int(mock_pair(str(number), config_of(16, 32))["swapped"]) for number in range(64)]
    assert 10 < sum(found) < 54


def test_replicas_read_the_samples_of_a_single_process() -> None:
    import torch

    from megatronapp_trainer.data.bert.mock_data import mock_batches

    config = config_of(16, 32)

    def rows(replicas: int) -> list[Any]:
        layouts = [
            Layout(rank=rank, world_size=replicas, local_rank=0, tensor_size=1, pipeline_size=1, virtual_size=1)
            for rank in range(replicas)
        ]
        streams = [mock_batches(config, layout, split=0, first_sample=4) for layout in layouts]
        return [batch for step in range(4 // replicas) for batch in (next(stream) for stream in streams)]

    for alone, divided in itertools.zip_longest(rows(1), rows(2)):
        assert all(torch.equal(alone[name], divided[name]) for name in alone)
