"""Start a program that dies with its parent: `python -I -S child.py PARENT_PID PROGRAM ARGUMENT...`.

Runs by path with the standard library alone, because it precedes every process of a job and every rank. A function
between fork and exec (preexec_fn) could deadlock in a process with threads; a program in between cannot.

The kernel sends the parent-death signal when the *thread* that forked ends (prctl(2)), so parents fork in their main
thread only. A parent that died before prctl took effect is noticed by the changed parent pid.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_STARTED = 127
"""Exit code of a program that cannot be started, as of a shell."""


def die_with_parent(parent: int) -> None:
    """Request SIGKILL for the end of `parent`; exit at once if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Replace this process by the program."""
    die_with_parent(int(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_SETMASK, set())  # the backend waits for its signals with all of them blocked
    command = sys.argv[2:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_STARTED)


if __name__ == "__main__":
    main()
