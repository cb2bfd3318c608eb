"""Search for files, and division into batches that a restart can continue from."""

import pathlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatronapp_trainer.data.prepare import sources
from megatronapp_trainer.data.prepare.sources import (
    DEFAULT_PATTERNS,
    START,
    DocumentBatch,
    DocumentFormat,
    batches,
    find_sources,
)
from megatronapp_trainer.errors import DataError


def find(*inputs: pathlib.Path | str, patterns: tuple[str, ...] = DEFAULT_PATTERNS) -> list[sources.InputFile]:
    return find_sources([str(name) for name in inputs], patterns, None)


def joined(work: list[DocumentBatch]) -> bytes:
    return b"".join(chunk.payload for batch in work for chunk in batch.chunks)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 16)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 24)
    monkeypatch.setattr(sources, "READ_BYTES", 5)
    monkeypatch.setattr(sources, "_FILES_PER_BATCH", 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    contents=st.lists(st.lists(st.text("ab \t", max_size=30), max_size=8), min_size=1, max_size=5),
    suffixes=st.lists(st.sampled_from([".txt", ".jsonl"]), min_size=5, max_size=5),
)
def test_reading_on_from_any_batch_gives_the_rest(
    contents: list[list[str]],
    suffixes: list[str],
    small_batches: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("sources")
    for number, lines in enumerate(contents):
        (folder / f"{number}{suffixes[number]}").write_text("\n".join(lines) + "x")
    found = find(folder)
    whole = list(batches(found, START))
    text = b"".join(pathlib.Path(source.path).read_bytes() for source in found)
    assert joined(whole) == text
    for index, batch in enumerate(whole):
        assert list(batches(found, batch.end)) == whole[index + 1 :]


def test_chunks_know_their_lines(tmp_path: pathlib.Path, small_batches: None) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"{number:07d}\n" for number in range(1, 11)))
    chunks = [chunk for batch in batches(find(tmp_path), START) for chunk in batch.chunks]
    assert [(chunk.first_line, int(chunk.payload[:7])) for chunk in chunks] == [(n, n) for n in (1, 3, 5, 7, 9)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_progress_is_reported_within_a_line_as_long_as_the_file(tmp_path: pathlib.Path, name: str) -> None:
    size_bytes = 3 * sources.CHUNK_BYTES
    (tmp_path / name).write_bytes(b"a" * size_bytes)
    reported: list[int] = []
    (batch,) = batches(find(tmp_path), START, reported.append)
    assert batch.size_bytes == sum(reported) == size_bytes
    assert max(reported) == sources.READ_BYTES


def test_directories_are_searched_and_each_file_is_taken_once(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.py", "sub/a.py", "c.txt", "empty.py"):
        (tmp_path / name).write_text("" if "empty" in name else "text")
    found = find(tmp_path, tmp_path / "b.py", f"{tmp_path}/**/*.py", patterns=("*.py",))
    assert [pathlib.Path(source.path).name for source in found] == ["b.py", "a.py"]


def test_the_suffix_selects_the_format(tmp_path: pathlib.Path) -> None:
    for name in ("a.jsonl", "b.txt"):
        (tmp_path / name).write_text("{}")
    assert [source.format for source in find(tmp_path)] == [DocumentFormat.JSONL, DocumentFormat.TEXT]
    assert find_sources([str(tmp_path / "a.jsonl")], (), DocumentFormat.TEXT)[0].format is DocumentFormat.TEXT


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "does not exist"),
        ("empty.txt", "is empty; remove it"),
        ("*.nothing", "matches no file"),
        ("folder", "--pattern"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: pathlib.Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=message):
        find(tmp_path / name)


def test_a_directory_of_empty_files_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="every file found is empty"):
        find(tmp_path)


def test_a_file_that_shrinks_is_noticed(tmp_path: pathlib.Path, small_batches: None) -> None:
    path = tmp_path / "a.txt"
    path.write_text("line\n" * 100)
    found = find(path)
    path.write_text("line\n" * 10)
    with pytest.raises(DataError, match=r"a\.txt became shorter"):
        list(batches(found, START))
