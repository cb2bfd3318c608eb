"""Checksums are those of the bytes however they are written, and name the damaged block to every reader."""

import errno
import os
import pathlib
import threading
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.checkpoint import checksums
from megatronapp_trainer.checkpoint.checksums import (
    BlockChecksums,
    ChecksummedFile,
    WrittenFile,
    checksum_of,
    first_damage,
)


def of_blocks(content: bytes, block_bytes: int) -> str:
    """The checksum by its definition."""
    starts = range(0, max(1, len(content)), block_bytes)
    return f"crc32/{block_bytes}:" + " ".join(
        f"{zlib.crc32(content[start : start + block_bytes]):08x}" for start in starts
    )


@given(st.lists(st.binary(max_size=20)), st.integers(1, 16))
def test_checksums_do_not_depend_on_how_bytes_are_chunked(chunks: list[bytes], block_bytes: int) -> None:
    sums = BlockChecksums(block_bytes)
    for chunk in chunks:
        sums.update(chunk)
    assert sums.text() == of_blocks(b"".join(chunks), block_bytes)


def test_a_disk_that_is_full_at_the_end_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    stream = ChecksummedFile(tmp_path / "data.distcp")
    stream.write(b"weights")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        stream.close()
    assert stream.closed


def test_a_written_file_knows_itself_and_is_on_the_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync

    def seen(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    path = tmp_path / "data.distcp"
    with ChecksummedFile(path) as stream:
        stream.write(b"weights")
        stream.write(memoryview(b" and more"))
        with pytest.raises(OSError, match="seek"):
            stream.seek(0)
    assert synced == [16]  # with what the buffer held
    assert stream.written() == WrittenFile(size=16, checksum=of_blocks(b"weights and more", 64 << 20))
    assert checksum_of(path) == stream.written().checksum


@pytest.mark.parametrize("content", [b"", b"123", b"1234", b"12345678", b"123456789"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_any_change_is_found_by_exactly_a_single_part(tmp_path: pathlib.Path, content: bytes, parts: int) -> None:
    path = tmp_path / "data.distcp"
    sums = {path.name: of_blocks(content, 4)}

    def flaws() -> list[str]:
        found = (first_damage(tmp_path, sums, part=part, parts=parts) for part in range(parts))
        return [flaw for flaw in found if flaw is not None]

    path.write_bytes(content)
    assert flaws() == []
    for place in range(len(content)):
        path.write_bytes(content[:place] + b"X" + content[place + 1 :])
        (flaw,) = flaws()
        start = place // 4 * 4
        end = "its end" if start + 4 >= len(content) else f"byte {start + 4}"
        assert f"its file data.distcp is damaged from byte {start} to {end}: the checksum there is" in flaw
    path.write_bytes(content + b"X")
    assert len(flaws()) == 1


def test_parts_may_split_a_single_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(40))
    (tmp_path / "b").write_bytes(bytes(8))
    sums = {"a": of_blocks(bytes(40), 4), "b": of_blocks(bytes(8), 4)}
    read: list[tuple[str, int]] = []
    crc32 = checksums._crc32

    def noted(path: pathlib.Path, block: checksums._FileBlock) -> int:
        read.append((block.file, block.offset))
        return crc32(path, block)

    monkeypatch.setattr(checksums, "_crc32", noted)
    parts_read = []
    for part in range(3):
        read.clear()
        assert first_damage(tmp_path, sums, part=part, parts=3) is None
        parts_read.append(sorted(read))
    assert [len(part_read) for part_read in parts_read] == [4, 4, 4]
    assert sorted(parts_read[0] + parts_read[1] + parts_read[2]) == [("a", n) for n in range(0, 40, 4)] + [
        ("b", 0),
        ("b", 4),
    ]


def test_blocks_outside_of_some_ranges_do_not_count(tmp_path: pathlib.Path) -> None:
    content = bytes(range(14))
    (tmp_path / "a").write_bytes(content)
    sums = {"a": of_blocks(bytes(14), 4)}  # every block is damaged

    def places(ranges: list[tuple[int, int]]) -> str | None:
        return first_damage(tmp_path, sums, within={"a": ranges, "absent": [(0, 4)]})

    assert places([]) is None
    assert first_damage(tmp_path, sums, within={}) is None
    for ranges, start in (([(4, 5)], 4), ([(7, 9)], 4), ([(8, 9)], 8), ([(13, 14)], 12), ([(9, 10), (3, 4)], 0)):
        assert f"from byte {start} to" in str(places(ranges)), ranges


def test_threads_read_at_the_same_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(8))
    both = threading.Barrier(2)
    crc32 = checksums._crc32

    def met(path: pathlib.Path, block: checksums._FileBlock) -> int:
        both.wait(timeout=180)
        return crc32(path, block)

    monkeypatch.setattr(checksums, "_crc32", met)
    assert first_damage(tmp_path, {"a": of_blocks(bytes(8), 4)}, threads=2) is None


def test_what_cannot_be_read_or_is_unknown_is_a_flaw(tmp_path: pathlib.Path) -> None:
    assert first_damage(tmp_path, {"gone": "crc32:00000000"}) == (
        "its file gone cannot be read (No such file or directory)"
    )
    (tmp_path / "there").touch()
    for unknown in ("md5:00", "crc32/0:00000000", "crc32/4:", "crc32/4:0", ""):
        assert "of a kind that this version does not know" in str(first_damage(tmp_path, {"there": unknown})), unknown
    assert "2 values instead of one" in str(first_damage(tmp_path, {"there": "crc32:00000000 00000000"}))


def test_a_short_fault_of_the_file_system_is_outlasted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    monkeypatch.setattr("megatronapp_trainer.utils.atomic_files.time.sleep", lambda _: None)
    faults = [errno.ESTALE, errno.EIO]
    opened = pathlib.Path.open

    def faulty(self: pathlib.Path, *arguments: object, **keywords: object) -> object:
        if faults:
            raise OSError(faults.pop(), "for a moment", str(self))
        return opened(self, *arguments, **keywords)  # type: ignore[call-overload]

    monkeypatch.setattr(pathlib.Path, "open", faulty)
    assert first_damage(tmp_path, {"a": of_blocks(b"1234", 4)}) is None
    assert faults == []
