"""Requests for a checkpoint: real launchers pass them on to their ranks, which continue."""

import contextlib
import ctypes
import functools
import os
import pathlib
import signal
import threading

import pytest
from launchers import Gang, wait_until

from megatronapp_common.names import Env, ExitCode
from megatronapp_common.save_request import SaveRequest
from megatronapp_trainer.checkpoint.saving.report import CheckpointReport
from megatronapp_trainer.parallel.peer_loss import END_AT_CHECKPOINT, SAVE
from megatronapp_trainer.training.signals import StopRequest

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def has_text(path: pathlib.Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


def test_each_request_for_this_attempt_reaches_the_ranks_of_its_worker_once(tmp_path: pathlib.Path) -> None:
    gang = Gang(tmp_path, proc_per_node="2")
    with contextlib.closing(gang):
        gang.request_checkpoint(0, SaveRequest(attempt=1, time=50))
        gang.start(dict.fromkeys(range(2), "saver"), SAVE_FILE=str(tmp_path / "save-0"))
        gang.running({0: [0, 1]})
        gang.go()
        (worker,) = gang.workers
        counts = [worker.run_dir / f"saves-{rank}" for rank in range(2)]
        for time, saves in ((100, "1"), (100, "1"), (200, "2")):
            gang.request_checkpoint(0, SaveRequest(attempt=0, time=time, nodes=("n1", "n2")))
            for count in counts:
                wait_until(functools.partial(has_text, count, saves))
        worker.process.terminate()
        assert worker.end() == ExitCode.PREEMPTED
        assert [count.read_text() for count in counts] == ["2", "2"]


def test_the_progress_document_has_the_time_of_a_checkpoint_as_others_read_it() -> None:
    report = CheckpointReport(iteration=20, taken_at=1.25)
    assert (report.to_json()["iteration"], report.to_json()["takenAt"]) == (20, "1970-01-01T00:00:01.250000Z")
    assert CheckpointReport().to_json()["takenAt"] is None


WATCHING_RANK = """
import pathlib, sys, time
from megatronapp_trainer.training.signals import StopRequest
page, seen = pathlib.Path(sys.argv[1]), None
with StopRequest() as request:
    while not request.requested:
        if request.at_checkpoint != seen:
            seen = request.at_checkpoint
            page.with_suffix(".new").write_text(str(seen))
            page.with_suffix(".new").rename(page)
        time.sleep(0.01)
sys.exit(75)
"""


def test_an_order_to_end_with_a_checkpoint_can_be_withdrawn_and_given_again(tmp_path: pathlib.Path) -> None:
    program, page = tmp_path / "watching.py", tmp_path / "page"
    program.write_text(WATCHING_RANK)
    gang = Gang(tmp_path, proc_per_node="1", program=str(program))
    gang.arguments = [str(page)]
    with contextlib.closing(gang):
        gang.start({}, ATTEMPT_FILE=str(gang.order_file(0)))
        wait_until(lambda: has_text(page, "False"))
        for order, seen in (
            ({"at_checkpoint": True}, "True"),
            ({"withdrawn": True}, "False"),
            ({"at_checkpoint": True}, "True"),
        ):
            gang.order(0, grace_s=0, **order)
            wait_until(functools.partial(has_text, page, seen))
        gang.workers[0].process.terminate()
        assert gang.workers[0].end() == ExitCode.PREEMPTED


@pytest.mark.parametrize(
    ("text", "ends"),
    [(None, True), ("2 0 checkpoint", True), ("2 0 continue", False), ("1 0 checkpoint", False), ("3 0", False)],
)
def test_of_several_signals_the_newest_order_holds(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str | None, ends: bool
) -> None:
    path = tmp_path / "order"
    monkeypatch.setenv(Env.ATTEMPT, "2")
    monkeypatch.delenv(Env.ATTEMPT_FILE, raising=False)
    if text is not None:
        monkeypatch.setenv(Env.ATTEMPT_FILE, str(path))
        path.write_text(text)
    with StopRequest() as request:
        request.at_checkpoint = not ends
        signal.raise_signal(END_AT_CHECKPOINT)
        assert request.at_checkpoint is ends


@pytest.mark.parametrize("number", [SAVE, END_AT_CHECKPOINT], ids=["save", "end at checkpoint"])
def test_a_request_interrupts_no_system_call_of_a_library(number: signal.Signals) -> None:
    """Check that a read outside of Python, which does not try again by itself, continues after the signal."""
    libc, place = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(1)
    source, sink = os.pipe()
    reader = threading.get_native_id()

    def signal_and_write() -> None:
        call, state = (pathlib.Path(f"/proc/self/task/{reader}/{name}") for name in ("syscall", "status"))
        try:
            wait_until(lambda: call.read_text().split()[1:2] == [hex(source)])
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            pending = "SigPnd:\t" + 16 * "0"
            wait_until(lambda: pending in state.read_text())
        finally:
            os.write(sink, b"x")

    with StopRequest() as request:
        writer = threading.Thread(target=signal_and_write)
        writer.start()
        count = libc.read(source, place, 1)
        writer.join()
        assert (count, place.raw) == (1, b"x"), os.strerror(ctypes.get_errno())
        assert (request.save, request.at_checkpoint) == (number == SAVE, number == END_AT_CHECKPOINT)
    os.close(source)
    os.close(sink)
