"""Flags of BERT, and what it refuses by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.config import parse
from megatronapp_trainer.errors import UsageErrors

MODEL = (
    "--model-type bert --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1"
)
MOCK = f"{MODEL} --mock-data --vocab-size 32"
CORPUS = f"{MODEL} --data-path corpus --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt"
VEE = "--use-dpp --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"


def refusal(flags: str) -> str:
    with pytest.raises(UsageErrors) as caught:
        parse(flags.split())
    return str(caught.value)


def test_a_bert_run_has_its_flags() -> None:
    config = parse(f"{CORPUS} --bert-no-binary-head --mask-prob 0.2 --short-seq-prob 0".split())
    assert config.model.type == "bert"
    assert not config.model.bert_binary_head
    assert (config.data.mask_prob, config.data.short_seq_prob) == (0.2, 0)
    assert parse(MOCK.split()).model.bert_binary_head


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--training-control", "--training-control is not supported with --model-type bert; leave it out"),
        ("--scope-capture-interval 2", "--scope-capture-interval is not supported with --model-type bert"),
        ("--calculate-per-token-loss", "--calculate-per-token-loss is not supported with --model-type bert"),
        ("--position-embedding-type rope", "--position-embedding-type rope is not supported with --model-type bert"),
        ("--window-size 4,0", "--window-size is not supported with --model-type bert"),
        ("--transformer-impl transformer_engine", "transformer_engine is not supported with --model-type bert"),
        (f"{VEE} --dpp-schedule zero-bubble", "--model-type bert cannot be placed in a vee yet"),
        ("--seq-length 7", "--seq-length 7 is too short for --model-type bert; take 8 or more"),
        ("--vocab-size 15", "--mock-data with --model-type bert needs --vocab-size 16 or more"),
        ("--mask-prob 1", "--mask-prob 1.0 must be above 0 and below 1"),
        ("--short-seq-prob 0", "--short-seq-prob is for samples of a corpus, and --mock-data has none"),
        ("--eod-mask-loss", "--eod-mask-loss does nothing with --model-type bert"),
    ],
)
def test_what_bert_does_not_do_is_refused_by_name(flags: str, reason: str) -> None:
    assert reason in refusal(f"{MOCK} {flags}")


def test_forward_ranks_are_refused_for_bert() -> None:
    flags = "--forward-backward-disaggregating --global-batch-size 4"
    assert "--forward-backward-disaggregating is not supported with --model-type bert" in refusal(f"{MOCK} {flags}")


@pytest.mark.parametrize(
    "flags",
    ["--bert-no-binary-head", "--mask-prob 0.2", "--short-seq-prob 0.2", "--tokenizer-type BertWordPieceLowerCase"],
)
def test_flags_of_bert_need_its_model_type(flags: str) -> None:
    assert "needs --model-type bert; add it, or leave" in refusal(MOCK.replace("--model-type bert", flags))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "--model-type bert needs its tokenizer: --vocab-file vocab.txt and --tokenizer-type"),
        ("--vocab-file vocab.txt", "a vocab.txt of WordPiece needs --tokenizer-type BertWordPieceLowerCase or"),
        ("--tokenizer-file tokenizer.json", "--model-type bert needs its tokenizer"),
        (
            "--tokenizer-type BertWordPieceCase --vocab-file vocab.txt --merge-file merges.txt",
            "--merge-file: --tokenizer-type BertWordPieceCase has only --vocab-file vocab.txt",
        ),
        ("--tokenizer-type BertWordPieceCased --vocab-file vocab.txt", "BertWordPieceCased is not supported"),
    ],
)
def test_a_corpus_needs_a_wordpiece_vocabulary(flags: str, reason: str) -> None:
    assert reason in refusal(f"{MODEL} --data-path corpus {flags}")


def test_a_corpus_with_its_vocabulary_is_accepted() -> None:
    assert parse(CORPUS.split()).data.is_wordpiece


@pytest.mark.parametrize(
    ("flags", "shortest"),
    [("--seq-length 9", 10), ("--mask-prob 0.01 --seq-length 64", 104), ("--mask-prob 0.3 --seq-length 6", None)],
)
def test_a_probability_that_masks_no_token_is_refused(flags: str, shortest: int | None) -> None:
    reason = refusal(f"{CORPUS} {flags}")
    if shortest is None:
        assert "masks no token" not in reason, "it is too short anyway"
        return
    assert f"masks no token of a sample; take --seq-length {shortest} or more" in reason
    assert parse(f"{CORPUS} {flags} --seq-length {shortest}".split()).model.seq_length == shortest
    assert parse(f"{MOCK} {flags}".split()).data.mock_data


@given(st.floats(0.001, 0.999), st.integers(8, 2000))
def test_lengths_that_are_accepted_or_proposed_allow_a_token(probability: float, length: int) -> None:
    flags = f"{CORPUS} --mask-prob {probability} --seq-length {length}"
    try:
        parse(flags.split())
    except UsageErrors as error:
        assert probability * (length - 3) < 1
        length = int(str(error).split("take --seq-length ")[1].split(maxsplit=1)[0])
        parse(f"{flags} --seq-length {length}".split())
    assert probability * (length - 3) >= 1
