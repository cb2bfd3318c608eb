"""Rank logs at the launcher's stdout, over real files and pipes."""

import os
import pathlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.launch.reporting import log_relay
from megatronapp_trainer.launch.reporting.log_relay import LONGEST_LINE, LogFollower, LogRelay


def repeated(tmp_path: pathlib.Path, logs: dict[int, bytes]) -> bytes:
    paths = {rank: tmp_path / f"rank-{rank}.log" for rank in logs}
    for rank, data in logs.items():
        paths[rank].write_bytes(data)
    reader, writer = os.pipe()
    found: list[bytes] = []

    def drain() -> None:
        with os.fdopen(reader, "rb") as pipe:
            found.append(pipe.read())

    thread = threading.Thread(target=drain)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_relay, "FINISH_S", 240.0)
        with LogRelay(writer, paths):
            pass
    os.close(writer)
    thread.join()
    return found[0]


def test_all_that_is_in_the_logs_is_repeated_with_its_rank(tmp_path: pathlib.Path) -> None:
    out = repeated(tmp_path, {0: b"one\n\ntwo\n", 3: b"last words without an end"}).splitlines()
    assert [line for line in out if line.startswith(b"[rank 0]")] == [b"[rank 0] one", b"[rank 0] ", b"[rank 0] two"]
    assert [line for line in out if line.startswith(b"[rank 3]")] == [b"[rank 3] last words without an end"]


def test_a_long_log_and_a_long_line_lose_nothing(tmp_path: pathlib.Path) -> None:
    many = b"".join(b"line %d\n" % number for number in range(200_000))  # more than is read at once
    out = repeated(tmp_path, {1: many + b"x" * (3 * LONGEST_LINE + 5)}).splitlines()
    assert len(many) > log_relay.READ_BYTES
    prefix = len(b"[rank 1] ")
    assert b"".join(line[prefix:] + b"\n" for line in out[:200_000]) == many
    assert sum(len(line) - prefix for line in out[200_000:]) == 3 * LONGEST_LINE + 5


@given(chunks=st.lists(st.binary(max_size=40), max_size=12))
def test_lines_do_not_depend_on_when_they_are_read(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("log") / "rank-5.log"
    path.touch()
    follower = LogFollower(5, path)
    lines: list[bytes] = []
    for chunk in chunks:
        with path.open("ab") as file:
            file.write(chunk)
        lines.extend(follower.lines())
    lines.extend(follower.lines(last=True))
    whole = b"".join(chunks)
    expected = whole.removesuffix(b"\n").split(b"\n") if whole else []
    assert lines == [b"[rank 5] " + line + b"\n" for line in expected]


def test_a_blocked_stdout_delays_no_rank(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_relay, "FINISH_S", 0.2)
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"y" * 100 + b"\n")
    with path.open("ab") as rank:
        rank.write(b"z\n" * 200_000)  # far more than a pipe holds, and no process reads it
    reader, writer = os.pipe()
    with LogRelay(writer, {0: path}) as stuck:
        pass
    assert stuck._thread.is_alive()
    os.close(reader)  # the thread ends with EPIPE
    stuck._thread.join()
    os.close(writer)
