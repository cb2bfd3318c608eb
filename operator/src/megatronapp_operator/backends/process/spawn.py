"""Start of the processes of a job, with the environment that all of them inherit."""

import ctypes
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from megatronapp_common import child
from megatronapp_common.names import Env

PR_SET_CHILD_SUBREAPER = 36
GUARDIAN_END_S = 5.0
"""Seconds for the guardian to end after its pipe was closed."""
OWN_ENVIRONMENT = frozenset(Env) - {Env.SHM_DIR}


def become_subreaper() -> None:
    """Adopt orphans of our workers, so that none escapes to init unseen (prctl(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def spawn(command: Sequence[str], *, environment: Mapping[str, str], log: pathlib.Path) -> subprocess.Popen[bytes]:
    """Start `command` in a new session and process group; it dies with this process. Main thread only."""
    wrapped = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *command]
    with log.open("ab") as out:
        return subprocess.Popen(
            wrapped,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def inherited_environment() -> dict[str, str]:
    """Return our environment without variables of a job that we might ourselves run in."""
    return {name: value for name, value in os.environ.items() if name not in OWN_ENVIRONMENT}


class GuardianProcess:
    """Guardian of a job; end of file on its standard input signals our end."""

    def __init__(self, uid: str, shm: pathlib.Path) -> None:
        self._command = [sys.executable, "-m", "megatronapp_operator.backends.process.guardian", uid, str(shm)]
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def keep(self) -> None:
        """Start it again if it was killed."""
        if self._process.poll() is not None:
            self.close()
            self._process = self._start()

    def close(self) -> None:
        """End it, by force if it was stopped by a signal."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(GUARDIAN_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=inherited_environment(),
            start_new_session=True,
        )


def is_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return True if the process has ended, without reaping it: until then its pid and group cannot be reused."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap_orphans(own: set[int]) -> None:
    """Reap adopted orphans that have ended; children in `own` are left to their owners."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in own:
            return
        os.waitpid(found.si_pid, os.WNOHANG)
