"""Start a program that dies with its launcher: `python -I -S child.py LAUNCHER_PID PROGRAM ARGUMENT...`.

Runs by path with the standard library alone. It is executed between fork and exec, because a function there
(preexec_fn) could deadlock in a launcher with threads. The kernel sends the signal when the launcher's forking thread
ends (prctl(2)), so the launcher forks in its main thread only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_STARTED = 127


def main() -> None:
    """Replace this process by the program."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != launcher:  # it died before the kernel knew
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_STARTED)


if __name__ == "__main__":
    main()
