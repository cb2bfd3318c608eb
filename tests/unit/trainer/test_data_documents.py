"""Documents out of lines and files, and the reasons why a line is none."""

import json

import numpy as np
import pytest

from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.prepare.documents import EncodeOptions, Encoder, ParsedTexts, parse
from megatronapp_trainer.data.prepare.sources import START, DocumentBatch, DocumentFormat, InputChunk


def chunk(
    payload: bytes, *, kind: DocumentFormat = DocumentFormat.JSONL, first_line: int = 1, closes: bool = True
) -> InputChunk:
    return InputChunk(path="corpus", format=kind, first_line=first_line, payload=payload, closes_file=closes)


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
    ],
    ids=["cut", "list", "key", "number", "surrogate", "bytes", "deep"],
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


def test_a_file_in_chunks_ends_once(trained: tokenizers.Tokenizer) -> None:
    chunks = [
        chunk(b"the\n", kind=DocumentFormat.TEXT, closes=False),
        chunk(b"dog\n", kind=DocumentFormat.TEXT, closes=True),
    ]
    first, second = encode(trained, chunks, eod=True)
    assert first[-1] != trained.eod
    assert second[-1] == trained.eod


def test_text_cannot_forge_the_end_of_a_document(trained: tokenizers.Tokenizer) -> None:
    (ids,) = encode(trained, [chunk(b"the <|endoftext|> dog", kind=DocumentFormat.TEXT)], eod=False)
    assert trained.eod not in ids
    assert trained.detokenize(ids) == "the <|endoftext|> dog"
