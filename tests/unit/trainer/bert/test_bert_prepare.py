"""`megatronapp data prepare --split-sentences` with WordPiece: files, restarts, tokens, refusals."""

import argparse
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import bert_corpus
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.data import cli
from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.corpus_check import inspect_corpus, sentences_of_documents
from megatronapp_trainer.data.prepare import pool, prepare, sources
from megatronapp_trainer.errors import DataError
from megatronapp_trainer.training import check

LOWER = "BertWordPieceLowerCase"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with vocab.txt and documents."""
    path = tmp_path_factory.mktemp("bert")
    bert_corpus.write_vocabulary(path / "vocab.txt")
    bert_corpus.write_documents(path / "text.jsonl", 60)
    return path


def run(folder: pathlib.Path, output: str, *more: str, sentences: bool = True) -> int:
    parser = argparse.ArgumentParser(prog="megatronapp")
    cli.register(parser.add_subparsers())
    command = ["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / output)]
    command += ["--tokenizer-type", LOWER, "--vocab-file", str(folder / "vocab.txt")]
    command += ["--split-sentences"] if sentences else []
    args = parser.parse_args(["data", "prepare", *command, "--workers", "1", *more])
    return int(args.func(args))


def stored(prefix: pathlib.Path) -> list[list[list[int]]]:
    """Return the token ids of each sentence of each document."""
    facts = inspect_corpus(str(prefix))
    ids = np.fromfile(f"{prefix}.bin", dtype=facts.token_type)
    sentences = [part.tolist() for part in np.split(ids, np.cumsum(facts.lengths)[:-1])]
    counts, longest = sentences_of_documents(facts)
    ends = np.cumsum(counts).tolist()
    documents = [sentences[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]
    assert [max(map(len, document)) for document in documents] == longest.tolist()
    return documents


def files(folder: pathlib.Path, output: str) -> tuple[bytes, bytes]:
    data, index = (folder / f"{output}_text_sentence{suffix}" for suffix in (".bin", ".idx"))
    return data.read_bytes(), index.read_bytes()


def test_the_corpus_holds_the_sentences_of_the_documents(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "whole") == 0
    printed = capsys.readouterr().out
    assert f"--model-type bert --data-path {folder}/whole_text_sentence --tokenizer-type {LOWER}" in printed
    assert "--bert-no-binary-head" not in printed
    tokenizer = tokenizers.load_wordpiece(folder / "vocab.txt", lowercase=True)
    documents = stored(folder / "whole_text_sentence")
    assert len(documents) == 60
    for number, sentences in enumerate(documents):
        text = bert_corpus.document(number)
        assert [token for sentence in sentences for token in sentence] == tokenizer.tokenize(text)
        ends = {tokenizer.vocab[mark] for mark in ".!?"}
        assert all(sentence[-1] in ends and not ends & set(sentence[:-1]) for sentence in sentences)


def test_printed_flags_train_whole_documents_without_the_order_of_sentences(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "documents", sentences=False) == 0
    printed = capsys.readouterr().out
    (flags,) = (line.removeprefix("train with: ") for line in printed.splitlines() if line.startswith("train with: "))
    shape = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --micro-batch-size 1"
    assert check.find_problems(f"{flags} {shape} --train-iters 2 --lr 1e-3 --eval-iters 0".split(), 1) == []
    assert "spec.args: [--bert-no-binary-head]" in printed


def test_megatron_reads_the_boundaries_of_documents(folder: pathlib.Path) -> None:
    from megatronapp_trainer.utils.silence_megatron import silence_megatron_imports

    assert run(folder, "read") == 0
    with silence_megatron_imports():
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    dataset = IndexedDataset(str(folder / "read_text_sentence"))
    counts = [len(document) for document in stored(folder / "read_text_sentence")]
    assert np.diff(dataset.document_indices).tolist() == counts


class OutageError(Exception):
    """Error in place of a power cut."""


def test_workers_and_restarts_give_the_same_files(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder, "single") == 0
    monkeypatch.setattr(sources, "BATCH_BYTES", 1000)
    monkeypatch.setattr(prepare, "_COMMIT_BYTES", 2000)
    assert run(folder, "two", "--workers", "2") == 0
    assert files(folder, "two") == files(folder, "single")
    encode = pool.encode_in_order

    def stopping(work: Any, *rest: Any) -> Iterator[Any]:
        for number, item in enumerate(encode(work, *rest)):
            if number == 5:
                raise OutageError
            yield item

    with monkeypatch.context() as stopped, pytest.raises(OutageError):
        stopped.setattr(prepare, "encode_in_order", stopping)
        run(folder, "again")
    assert (folder / "again.preparing" / "text.sentences").stat().st_size > 0
    assert run(folder, "again") == 0
    assert files(folder, "again") == files(folder, "single")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--merge-file merges.txt", "has one file: give --vocab-file vocab.txt alone"),
        ("--append-eod", "the tokenizer has no end-of-document token"),
        ("--tokenizer-type GPT2BPETokenizer", f"for BERT's vocab.txt give --tokenizer-type {LOWER} or"),
    ],
)
def test_flags_that_do_not_go_together(
    folder: pathlib.Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "refused", *flags.split()) != 0
    assert message in capsys.readouterr().err


def test_a_language_needs_sentences(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="megatronapp")
    cli.register(parser.add_subparsers())
    command = ["--input", str(folder / "text.jsonl"), "--output", "out", "--lang", "german"]
    args = parser.parse_args(["data", "prepare", *command, "--tokenizer-file", "tokenizer.json"])
    assert args.func(args) == 2
    assert "--lang is the language of --split-sentences" in capsys.readouterr().err


def spelled(text: str, vocabulary: dict[str, int], *, lowercase: bool) -> list[int]:
    """Return the ids of WordPiece by its definition, for ASCII: the longest known beginning, then ##continuations."""
    tokens: list[int] = []
    marked = "".join(mark if mark.isalnum() or mark == " " else f" {mark} " for mark in text)
    for whole in (marked.lower() if lowercase else marked).split():
        found: list[int] = []
        begin = 0
        while begin < len(whole):
            prefix = "##" if begin else ""
            known = (end for end in range(len(whole), begin, -1) if prefix + whole[begin:end] in vocabulary)
            end = next(known, 0)
            if not end:
                found = [vocabulary["[UNK]"]]
                break
            found.append(vocabulary[prefix + whole[begin:end]])
            begin = end
        tokens += found
    return tokens


@given(st.text(st.sampled_from("abeghiknrst TRAX.,!-09"), max_size=40), st.booleans())
def test_tokens_are_those_of_the_definition(folder: pathlib.Path, text: str, lowercase: bool) -> None:
    tokenizer = tokenizers.load_wordpiece(folder / "vocab.txt", lowercase=lowercase)
    assert tokenizer.tokenize(text) == spelled(text, tokenizer.vocab, lowercase=lowercase)


def test_lower_case_strips_accents_and_cased_does_not(folder: pathlib.Path) -> None:
    lower, cased = (tokenizers.load_wordpiece(folder / "vocab.txt", lowercase=lowercase) for lowercase in (True, False))
    assert lower.tokenize("Thé RANK") == lower.tokenize("the rank")
    assert cased.tokenize("The") == [cased.vocab["The"]]
    assert cased.tokenize("thé") == [cased.vocab["[UNK]"]]
    assert lower.digest != cased.digest


def test_a_vocabulary_without_special_tokens_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\nthe\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"vocab\.txt cannot be read as a tokenizer \(it has no \[CLS\] \[SEP\]"):
        tokenizers.load_wordpiece(tmp_path / "vocab.txt", lowercase=True)


def test_documents_longer_than_a_sample_are_reported(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    known = [token for token in (folder / "vocab.txt").read_text().split() if token.isalpha()]
    text = " ".join((known * 700)[:700]) + ". A " + known[0] + "."
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": known[0]}) + "\n")
    long = ("--input", str(tmp_path / "long.jsonl"))
    assert run(folder, "long", *long, sentences=False) == 0
    printed = capsys.readouterr().out
    stored_tokens = len(stored(folder / "long_text_document")[0][0])
    assert f"warning: 1 sequences of {folder}/long_text_document are longer" in printed
    assert f"{stored_tokens - 509} tokens are not trained on; prepare with --split-sentences" in printed
    assert run(folder, "short", sentences=False) == 0
    assert "warning" not in capsys.readouterr().out
    flags = (
        "--model-type bert --num-layers 1 --hidden-size 32 --num-attention-heads 2 --micro-batch-size 1 --lr 1e-3 "
        f"--train-iters 2 --eval-iters 0 --split 1,0,0 --tokenizer-type {LOWER} --vocab-file {folder}/vocab.txt "
        f"--bert-no-binary-head --data-path {folder}/long_text_document"
    )
    assert check.find_problems(f"{flags} --seq-length 1024".split(), 1) == []
    assert not caplog.records
    assert check.find_problems(f"{flags} --seq-length 128".split(), 1) == []
    assert "1 of 2 sequences have more than 125 tokens" in caplog.text
    assert f"{100 * (stored_tokens - 125) / (stored_tokens + 1):.1f} % of all tokens" in caplog.text
