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


def start_guardian(uid: str, shm: pathlib.Path) -> subprocess.Popen[bytes]:
    """Start the guardian; end of file on its standard input signals our end."""
    return subprocess.Popen(
        [sys.executable, "-m", "megatronapp_operator.backends.process.guardian", uid, str(shm)],
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
