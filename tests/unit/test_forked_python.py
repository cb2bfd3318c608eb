"""Programs forked from the fork server behave as programs of a new interpreter."""

import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest

PROGRAM = """
    import os, signal, sys
    print(sys.argv[1:], os.environ["COLOUR"], os.getcwd(), __name__, flush=True)
    if sys.argv[1] == "wait":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # one that arrives before the wait ends it, too
        print(os.getpid(), flush=True)
        signal.sigwait([signal.SIGTERM])
        sys.exit(7)
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


def grandparent() -> int:
    """Return the process id of the server: ranks are forked from a handler."""
    stat = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8")
    return int(stat.rpartition(")")[2].split()[1])


@pytest.mark.full("imports torch anew; the processes of each run of `make test` share a server")
def test_a_server_of_several_clients_ends_with_its_owner(forkserver: Any) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner,
        tempfile.TemporaryDirectory() as folder,
    ):
        clients = [type(forkserver)(pathlib.Path(folder), owner=owner.pid) for _ in range(3)]
        threads = [threading.Thread(target=client.start) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [client.run(2, grandparent) for client in clients]
        server = found[0][0]
        assert found == [[server, server]] * 3
        with os.fdopen(os.pidfd_open(server), "rb") as process:
            clients[0].stop()
            assert clients[1].run(1, grandparent) == [server], "it is not ended by a client"
            owner.kill()
            assert select.select([process], [], [], DEADLINE_S)[0]
