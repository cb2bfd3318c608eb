"""File locks and the termination of child processes."""

import fcntl
import os
import pathlib
import subprocess


def is_locked(path: pathlib.Path) -> bool:
    """Return true if a process holds an exclusive lock (flock) on the file, false if no such file exists.

    A shared lock is taken for a moment. The file is opened for reading only, so that nothing has to be writable.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def terminate(process: "subprocess.Popen[bytes] | subprocess.Popen[str]", patience_s: float) -> None:
    """End a child process by SIGTERM, and by SIGKILL if it has not ended after `patience_s`."""
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
