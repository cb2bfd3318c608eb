"""Programs forked from the fork server behave as programs of a new interpreter."""

import os
import pathlib
import select
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

PROGRAM = """
    import os, pathlib, signal, sys, time
    print(sys.argv[1:], os.environ["COLOUR"], os.getcwd(), __name__, flush=True)
    if sys.argv[1] == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print(os.getpid(), flush=True)
        time.sleep(600)
    if sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    print("an error", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
"""
DEADLINE_S = 120


@pytest.fixture
def start(forkserver: Any, tmp_path: pathlib.Path) -> Iterator[Any]:
    """Start the program with these arguments."""
    (tmp_path / "program_of_test.py").write_text(textwrap.dedent(PROGRAM))
    environment = os.environ | {"COLOUR": "red", "PYTHONPATH": str(tmp_path)}
    started = []

    def call(*arguments: str) -> subprocess.Popen[str]:
        command = [*forkserver.python(), "-m", "program_of_test", *arguments]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=pipe, stderr=pipe, encoding="utf-8")
        )
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def test_arguments_environment_folder_output_and_exit_code(start: Any, tmp_path: pathlib.Path) -> None:
    process = start("3", "é")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out, err) == (3, f"['3', 'é'] red {tmp_path} __main__\n", "an error\n")
    assert start("0").wait(DEADLINE_S) == 0
    assert start("die").wait(DEADLINE_S) == -signal.SIGKILL


def test_a_signal_is_sent_on(start: Any) -> None:
    process = start("wait")
    process.stdout.readline()
    process.stdout.readline()
    process.terminate()
    assert process.wait(DEADLINE_S) == 7


def test_a_program_ends_with_the_process_that_it_replaces(start: Any) -> None:
    process = start("wait")
    process.stdout.readline()
    with os.fdopen(os.pidfd_open(int(process.stdout.readline())), "rb") as program:
        process.kill()
        assert select.select([program], [], [], DEADLINE_S)[0]
