"""Spawning, reaping and killing processes, and the process attributes that Linux sets for them."""

import contextlib
import ctypes
import dataclasses
import logging
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import psutil

from megatronapp_common import child

PR_SET_PDEATHSIG = 1
PR_GET_PDEATHSIG = 2
PR_SET_CHILD_SUBREAPER = 36
LOG_MODE = 0o644
KILL_S = 5.0

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReapedProcess:
    """A child process that was reaped."""

    pid: int
    code: int
    signal: int | None


def spawn(command: Sequence[str], *, environment: Mapping[str, str], log: pathlib.Path) -> int:
    """Start a program that is killed when this process ends, its output in `log`; returns its pid.

    Must be called in the main thread (see `child`).
    """
    trampoline = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *command]
    output_flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        trampoline,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), output_flags, LOG_MODE),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsigmask=[],
        setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE],
    )


def reap() -> Iterator[ReapedProcess]:
    """Yield every child that has ended by now, adopted orphans included."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        yield ReapedProcess(pid=pid, code=max(code, 0), signal=-code if code < 0 else None)


def send(pid: int, number: signal.Signals) -> None:
    """Signal a child that is not reaped yet; one that has just ended is ignored."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_descendants(limit_s: float = KILL_S) -> None:
    """Kill what the ranks have left running. As subreaper this process is the parent of their orphans.

    Gives up after `limit_s` seconds, with a warning: a process inside of a driver or a dead file server cannot be
    killed, and the launcher must report how its ranks ended in any case.
    """
    deadline = time.monotonic() + limit_s
    while orphans := psutil.Process().children(recursive=True):
        if time.monotonic() >= deadline:
            log.warning(
                "left running, as it cannot be killed: %s", ", ".join(f"process {orphan.pid}" for orphan in orphans)
            )
            return
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
        for _ in reap():
            pass
        psutil.wait_procs([orphan for orphan in orphans if orphan.is_running()], timeout=0.05)


def let_through(numbers: Iterable[signal.Signals]) -> None:
    """Unblock these signals, including pending ones that `__main__` has blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def stop_with_parent() -> None:
    """Request SIGTERM for the end of the process that started us, unless it has set a signal of its choice."""
    parent = os.getppid()
    if parent <= 1 or _parent_death_signal() != 0:
        return
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)


def _parent_death_signal() -> int:
    number = ctypes.c_int()
    _prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def _prctl(option: int, argument: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
