"""Documents out of lines and files, and the reasons why a line is none."""

import json

import numpy as np
import pytest

from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.prepare.documents import EncodeOptions, Encoder, ParsedTexts, parse
from megatronapp_trainer.data.prepare.sources import START, DocumentBatch, DocumentFormat, InputChunk


def chunk(payload: bytes, *, kind: DocumentFormat = DocumentFormat.JSONL, first_line: int = 1) -> InputChunk:
    return InputChunk(path="corpus", format=kind, first_line=first_line, payload=payload)


def parsed(
    payload: bytes, kind: DocumentFormat = DocumentFormat.JSONL, keys: tuple[str, ...] = ("text",)
) -> ParsedTexts:
    return parse([chunk(payload, kind=kind, first_line=10)], keys)


def test_lines_become_documents() -> None:
    lines = b'{"text": "one"}\n\n{"text": "two", "more": 1}\r\n{"text": ""}\n'
    result = parsed(lines)
    assert result.texts == {"text": ["one", "two"]}
    assert result.empty == 1
    assert not result.bad


def test_several_keys() -> None:
    result = parsed(b'{"a": "1", "b": "2"}', keys=("a", "b"))
    assert result.texts == {"a": ["1"], "b": ["2"]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "is not JSON"),
        (b"[1]", "is a JSON list"),
        (b'{"txt": "x"}', "has no key 'text' (it has txt"),
        (b'{"text": 7}', "has a int under 'text'"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b'{"text": "\xff"}', "is not UTF-8 (byte 0xff)"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"text": "a", "id": ' + b"1" * 5000 + b"}", "is not JSON (Exceeds the limit"),
    ],
    ids=["cut", "list", "key", "number", "surrogate", "bytes", "deep", "digits"],
)
def test_a_bad_line_is_reported_and_the_others_are_parsed(line: bytes, reason: str) -> None:
    result = parsed(b'{"text": "before"}\n' + line + b'\n{"text": "after"}')
    assert result.texts["text"] == ["before", "after"]
    (bad,) = result.bad
    assert (bad.path, bad.line) == ("corpus", 11)
    assert reason in bad.reason


def test_a_text_file_is_a_single_document_and_a_bad_byte_has_a_line() -> None:
    assert parsed("größer\nals".encode(), DocumentFormat.TEXT).texts["text"] == ["größer\nals"]
    assert parsed(b" \n", DocumentFormat.TEXT).empty == 1
    (bad,) = parsed(b"one\ntwo\nthr\xffe\n", DocumentFormat.TEXT).bad
    assert bad.line == 12


def test_of_a_text_file_the_bad_lines_alone_are_skipped() -> None:
    result = parsed(b"one\r\n\n\xfftwo\nthree\n\xff\xff\nf\xc3\xbcnf", DocumentFormat.TEXT)
    assert result.texts["text"] == ["one\r\n\nthree\nfünf"]
    assert [bad.line for bad in result.bad] == [12, 14]
    assert all("byte 0xff" in bad.reason for bad in result.bad)
    nothing = parsed(b"\xff\n", DocumentFormat.TEXT)
    assert (nothing.texts["text"], nothing.empty, len(nothing.bad)) == ([], 0, 1)


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    return tokenizers.train(["the quick brown fox", "jumps over the lazy dog"] * 20, 300)


def encoder(tokenizer: tokenizers.Tokenizer, *, eod: bool) -> Encoder:
    options = EncodeOptions(keys=("text",), dtype="uint16", eod=tokenizer.eod if eod else None)
    return Encoder(tokenizer.backend.to_str(), options)


def encode(tokenizer: tokenizers.Tokenizer, chunks: list[InputChunk], *, eod: bool) -> list[list[int]]:
    (encoded,) = encoder(tokenizer, eod=eod)(DocumentBatch(chunks=tuple(chunks), end=START)).encoded.values()
    ids = np.frombuffer(encoded.ids, dtype=np.uint16)
    return [part.tolist() for part in np.split(ids, np.cumsum(encoded.lengths)[:-1])]


def test_ids_are_those_of_the_tokenizer(trained: tokenizers.Tokenizer) -> None:
    texts = ["the fox", "a dog: ümlaut"]
    lines = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    assert encode(trained, [chunk(lines)], eod=False) == [trained.tokenize(text) for text in texts]
    assert encode(trained, [chunk(lines)], eod=True) == [[*trained.tokenize(text), trained.eod] for text in texts]


def test_each_part_of_a_file_is_a_document_with_an_end(trained: tokenizers.Tokenizer) -> None:
    parts = [chunk(b"the\n", kind=DocumentFormat.TEXT), chunk(b"dog\n", kind=DocumentFormat.TEXT)]
    expected = [[*trained.tokenize(text), trained.eod] for text in ("the\n", "dog\n")]
    assert encode(trained, parts, eod=True) == expected


def test_text_cannot_forge_the_end_of_a_document(trained: tokenizers.Tokenizer) -> None:
    (ids,) = encode(trained, [chunk(b"the <|endoftext|> dog", kind=DocumentFormat.TEXT)], eod=False)
    assert trained.eod not in ids
    assert trained.detokenize(ids) == "the <|endoftext|> dog"
