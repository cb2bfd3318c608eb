"""Corpora of BERT are judged by their sentences before anything is started."""

import json
import pathlib
import struct

import bert_corpus
import numpy as np
import pytest

from megatronapp_common.names import ExitCode
from megatronapp_trainer.data.tokenizer import load_wordpiece
from megatronapp_trainer.training import check

FLAGS = (
    "--model-type bert --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 128 --micro-batch-size 1 "
    "--train-iters 2 --lr 1e-3 --eval-iters 1 --split 97,3,0 --tokenizer-type BertWordPieceLowerCase"
)
SENTENCE = 6
"""Tokens of each sentence."""


def write_corpus(prefix: pathlib.Path, documents: list[int]) -> str:
    """Write documents of these numbers of sentences, and return their prefix."""
    sentences = sum(documents)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, sentences, len(documents) + 1)
    lengths = np.full(sentences, SENTENCE, dtype=np.int32)
    offsets = np.arange(sentences, dtype=np.int64) * SENTENCE * 2
    boundaries = np.cumsum([0, *documents], dtype=np.int64)
    parts = (lengths, offsets, boundaries)
    prefix.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in parts))
    prefix.with_suffix(".bin").write_bytes(np.full(sentences * SENTENCE, 7, dtype=np.uint16).tobytes())
    return str(prefix)


@pytest.fixture
def problems(tmp_path: pathlib.Path) -> "Problems":
    """Problems of corpora in a folder with a vocabulary."""
    bert_corpus.write_vocabulary(tmp_path / "vocab.txt")
    return Problems(tmp_path)


class Problems:
    """Problems that are found with corpora of a folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def of(self, documents: list[int], more: str = "") -> list[check.ArgumentProblem]:
        """Return those of a corpus of documents of these numbers of sentences."""
        corpus = write_corpus(self.folder / "corpus", documents)
        data = f"--vocab-file {self.folder / 'vocab.txt'} --data-path {corpus}"
        return check.find_problems(f"{FLAGS} {data} {more}".split(), 1)


def test_documents_count_and_not_their_sentences(problems: Problems) -> None:
    # The last of the documents is 3 % of them; the last 3 % of the sentences are fewer tokens than a sample.
    assert problems.of([3] * 33) == []


def test_documents_of_single_sentences_give_no_pairs(problems: Problems) -> None:
    (problem,) = problems.of([1] * 1000)
    assert (problem.code, problem.flags, problem.value) == (
        ExitCode.DATA,
        ("--data-path",),
        str(problems.folder / "corpus"),
    )
    assert "the train part" in problem.message
    assert "none with 2 or more sentences" in problem.message
    assert problems.of([1] * 1000, "--bert-no-binary-head") == []


def test_another_case_is_reported_with_the_flags_of_bert(problems: Problems) -> None:
    of_cased = load_wordpiece(problems.folder / "vocab.txt", lowercase=False).digest
    summary = {"tokenizer_digest": of_cased, "vocab_size": 10}
    (problems.folder / "corpus.json").write_text(json.dumps({"summary": summary}))
    (problem,) = problems.of([3] * 33)
    assert "another tokenizer than the one given; give that one (--tokenizer-type and --vocab-file)" in problem.message
    assert problems.of([3] * 33, "--tokenizer-type BertWordPieceCase") == []


def test_a_split_without_a_document_is_a_problem(problems: Problems) -> None:
    (problem,) = problems.of([3] * 10)
    assert "the valid part" in problem.message
    assert problems.of([3] * 10, "--eval-iters 0") == []
