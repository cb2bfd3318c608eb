"""Pages: a reader in another process sees whole documents only."""

import pathlib
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.errors import DocumentError
from megatronapp_common.shared_documents import DOCUMENT_BYTES, DocumentReader, DocumentWriter

WRITER = """
import pathlib, sys
from megatronapp_common.shared_documents import DocumentWriter
page = DocumentWriter(pathlib.Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    page.write({"number": number, "again": [number] * (number % 700)})
"""
DEADLINE_S = 120


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "page"


def test_a_document_is_read_back(path: pathlib.Path) -> None:
    writer, reader = DocumentWriter(path), DocumentReader(path)
    assert reader.read() is None, "nothing was written yet"
    writer.write({"a": 1, "b": [None, "ü"]})
    assert reader.read() == {"a": 1, "b": [None, "ü"]}
    writer.write({})
    assert reader.read() == {}


def test_a_document_may_be_written_after_its_reader_opens(path: pathlib.Path) -> None:
    reader = DocumentReader(path)
    assert reader.read() is None
    path.write_bytes(b"")
    assert reader.read() is None, "a file that is not whole yet"
    DocumentWriter(path).write({"a": 1})
    assert reader.read() == {"a": 1}


def test_only_changes_are_new(path: pathlib.Path) -> None:
    writer, reader = DocumentWriter(path), DocumentReader(path)
    assert reader.read_new() is None
    writer.write({"a": 1})
    assert reader.read_new() == {"a": 1}
    assert reader.read_new() is None
    writer.write({"a": 1})
    assert reader.read_new() == {"a": 1}


def test_the_file_is_for_owner_and_group(path: pathlib.Path) -> None:
    DocumentWriter(path)
    assert path.stat().st_mode & 0o777 & ~0o640 == 0
    assert path.stat().st_size == DOCUMENT_BYTES


def test_a_closed_document_is_removed_only_on_request(path: pathlib.Path) -> None:
    DocumentWriter(path).close()
    assert path.exists()
    writer = DocumentWriter(path)
    path.unlink()
    writer.close(unlink=True)
    assert not path.exists()


def test_a_reader_keeps_what_it_mapped(path: pathlib.Path) -> None:
    writer, reader = DocumentWriter(path), DocumentReader(path)
    writer.write({"a": 1})
    assert reader.read() == {"a": 1}
    writer.close(unlink=True)
    assert reader.read() == {"a": 1}
    reader.close()
    assert reader.read() is None


def test_a_new_writer_takes_over_without_harm_to_readers(path: pathlib.Path) -> None:
    DocumentWriter(path).write({"a": 1})
    reader = DocumentReader(path)
    assert reader.read_new() == {"a": 1}
    writer = DocumentWriter(path)
    assert reader.read() == {"a": 1}, "the mapped file was not cut"
    writer.write({"a": 2})
    assert reader.read_new() == {"a": 2}


def test_a_new_writer_continues_after_an_unfinished_write(path: pathlib.Path) -> None:
    DocumentWriter(path).write({"a": 1})
    content = bytearray(path.read_bytes())
    struct.pack_into("<Q", content, 0, 5)
    path.write_bytes(content)
    reader = DocumentReader(path)
    assert reader.read() is None
    DocumentWriter(path).write({"a": 2})
    assert reader.read_new() == {"a": 2}


def test_a_document_that_is_too_large_is_refused(path: pathlib.Path) -> None:
    writer = DocumentWriter(path)
    writer.write({"a": 1})
    with pytest.raises(DocumentError, match="does not fit into"):
        writer.write({"a": "x" * DOCUMENT_BYTES})
    assert DocumentReader(path).read() == {"a": 1}, "the old document stays"


def test_a_document_that_cannot_be_created(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DocumentError, match="cannot create a document"):
        DocumentWriter(tmp_path / "absent" / "page")


@given(at=st.integers(16, 60), value=st.integers(0, 255))
def test_a_torn_document_is_never_returned(tmp_path_factory: pytest.TempPathFactory, at: int, value: int) -> None:
    path = tmp_path_factory.mktemp("page") / "page"
    writer = DocumentWriter(path)
    document = {"text": "y" * 60}
    writer.write(document)
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)
    assert DocumentReader(path).read() in (None, document)


def test_a_document_in_the_making_is_not_returned(path: pathlib.Path) -> None:
    DocumentWriter(path).write({"a": 1})
    content = bytearray(path.read_bytes())
    struct.pack_into("<Q", content, 0, 3)
    path.write_bytes(content)
    assert DocumentReader(path).read() is None


def test_two_processes(path: pathlib.Path) -> None:
    count = 3000
    command = [sys.executable, "-c", WRITER, str(path), str(count)]
    reader, seen = DocumentReader(path), []
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            document = reader.read_new()
            if document is not None:
                seen.append(document["number"])
                assert document["again"] == [document["number"]] * (document["number"] % 700)
        assert process.wait(DEADLINE_S) == 0
    assert seen == sorted(set(seen)), "never backwards, never twice"
    last = DocumentReader(path).read()
    assert last is not None
    assert last["number"] == count - 1


def test_a_document_that_was_mapped_is_read_after_its_file_was_removed_until_there_is_another(
    path: pathlib.Path,
) -> None:
    reader = DocumentReader(path)
    assert not reader.map()
    writer = DocumentWriter(path)
    assert reader.map()
    writer.write({"iteration": 12})
    writer.close(unlink=True)
    assert reader.map() and reader.read() == {"iteration": 12}
    DocumentWriter(path).write({"iteration": 1})
    assert reader.map() and reader.read() == {"iteration": 1}
