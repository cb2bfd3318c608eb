"""Damage to a corpus is named before megatron-core meets it."""

import json
import pathlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.data import corpus_check
from megatronapp_trainer.data.corpus_check import CorpusFacts, check_ends, check_vocabulary, inspect_corpus
from megatronapp_trainer.errors import DataError

LENGTHS = [3, 5, 2]


def write_corpus(prefix: pathlib.Path, lengths: list[int], largest: int = 9) -> str:
    """A corpus in Megatron's format, written here from its description."""
    sizes = np.array(lengths, dtype=np.int32)
    offsets = (np.cumsum(sizes, dtype=np.int64) - sizes) * 2
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1)
    document_indices = np.arange(len(lengths) + 1, dtype=np.int64)
    prefix.with_suffix(".idx").write_bytes(header + sizes.tobytes() + offsets.tobytes() + document_indices.tobytes())
    tokens = np.arange(int(sizes.sum()), dtype=np.uint16) % (largest + 1)
    tokens[-1:] = largest
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())
    return str(prefix)


@pytest.fixture
def prefix(tmp_path: pathlib.Path) -> str:
    return write_corpus(tmp_path / "corpus", LENGTHS)


def test_a_whole_corpus(prefix: str) -> None:
    facts = inspect_corpus(prefix)
    assert facts.lengths.tolist() == LENGTHS
    assert facts.token_type == np.uint16
    assert facts.tokens_between(0.0, 1.0) == (3, 10)
    assert facts.tokens_between(0.5, 1.0) == (1, 2)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=50), fraction=st.floats(0, 1))
def test_parts_cover_the_corpus(lengths: list[int], fraction: float) -> None:
    facts = CorpusFacts(prefix="p", lengths=np.array(lengths, dtype=np.int32), token_type=np.dtype(np.uint16))
    first, second = facts.tokens_between(0.0, fraction), facts.tokens_between(fraction, 1.0)
    assert (first[0] + second[0], first[1] + second[1]) == (len(lengths), sum(lengths))


@given(keep=st.integers(0, 200))
def test_an_index_truncated_anywhere_is_refused(tmp_path_factory: pytest.TempPathFactory, keep: int) -> None:
    prefix = write_corpus(tmp_path_factory.mktemp("cut") / "corpus", LENGTHS)
    path = pathlib.Path(prefix + ".idx")
    whole = path.read_bytes()
    path.write_bytes(whole[: min(keep, len(whole) - 1)])
    with pytest.raises(DataError, match=r"corpus\.idx .*--overwrite"):
        inspect_corpus(prefix)


def test_data_that_does_not_fit_its_index(prefix: str) -> None:
    with open(prefix + ".bin", "ab") as stream:
        stream.write(b"xx")
    with pytest.raises(DataError, match=r"22 bytes where corpus\.idx requires 20"):
        inspect_corpus(prefix)


@pytest.mark.parametrize(("place", "value"), [(0, b"X"), (9, b"\x02"), (17, b"\x63")], ids=["magic", "version", "type"])
def test_a_foreign_index(prefix: str, place: int, value: bytes) -> None:
    path = pathlib.Path(prefix + ".idx")
    content = bytearray(path.read_bytes())
    content[place : place + 1] = value
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="first bytes are wrong"):
        inspect_corpus(prefix)


def test_missing_files_are_answered_with_what_is_there(prefix: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match=f"holds {prefix}"):
        inspect_corpus(str(tmp_path / "corpse"))
    with pytest.raises(DataError, match="without its ending"):
        inspect_corpus(prefix + ".bin")
    with pytest.raises(DataError, match="megatronapp data prepare"):
        inspect_corpus(str(tmp_path / "nowhere" / "corpus"))
    pathlib.Path(prefix + ".bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin does not exist"):
        inspect_corpus(prefix)


def test_an_empty_corpus(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        inspect_corpus(write_corpus(tmp_path / "empty", []))


def note(prefix: str, digest: str, vocab_size: int) -> None:
    summary = {"tokenizer_digest": digest, "vocab_size": vocab_size}
    pathlib.Path(prefix + ".json").write_text(json.dumps({"summary": summary}))


def test_the_tokenizer_is_compared(prefix: str) -> None:
    token_type = np.dtype(np.uint16)
    note(prefix, "abc", 10)
    check_vocabulary(prefix, vocab_size=10, digest="abc", token_type=token_type)
    check_vocabulary(prefix, vocab_size=10, digest=None, token_type=token_type)
    with pytest.raises(DataError, match="another tokenizer"):
        check_vocabulary(prefix, vocab_size=10, digest="xyz", token_type=token_type)
    with pytest.raises(DataError, match="up to 9, but the vocabulary has 9"):
        check_vocabulary(prefix, vocab_size=9, digest=None, token_type=token_type)


def test_without_a_recorded_maximum_the_tokens_are_read(prefix: str) -> None:
    check_vocabulary(prefix, vocab_size=10, digest="any", token_type=np.dtype(np.uint16))
    with pytest.raises(DataError, match="up to 9, but the vocabulary has 5"):
        check_vocabulary(prefix, vocab_size=5, digest="any", token_type=np.dtype(np.uint16))


def test_ends_of_documents_are_compared_with_the_record(prefix: str) -> None:
    facts = inspect_corpus(prefix)

    def check(recorded: int | None) -> None:
        pathlib.Path(prefix + ".json").write_text(json.dumps({"summary": {"eod": recorded}}))
        check_ends(prefix, eod=4, lengths=facts.lengths, token_type=facts.token_type)

    check(4)
    with pytest.raises(DataError, match=r"no token that ends its documents, but .*look for token 4.*--append-eod"):
        check(None)
    with pytest.raises(DataError, match="documents that end with 5, but"):
        check(5)


def test_without_a_record_a_missing_end_of_documents_is_a_warning(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    facts = inspect_corpus(prefix)
    note(prefix, "of an earlier release", 10)
    check_ends(prefix, eod=7, lengths=facts.lengths, token_type=facts.token_type)
    assert not caplog.records
    check_ends(prefix, eod=11, lengths=facts.lengths, token_type=facts.token_type)
    assert "no document end (token 11)" in caplog.text


def test_ends_are_sampled_over_the_whole_corpus(
    prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(corpus_check, "_WINDOW", 1)
    facts = inspect_corpus(prefix)
    check_ends(prefix, eod=7, lengths=facts.lengths, token_type=facts.token_type)
    assert not caplog.records, "7 ends the second sequence"
    check_ends(prefix, eod=6, lengths=facts.lengths, token_type=facts.token_type)
    assert "no document end (token 6)" in caplog.text
