"""Cleanup after a backend that was killed.

`python -m megatronapp_operator.backends.process.guardian JOB_UID SHM_DIR` runs in a separate process session. Its
standard input is a pipe whose other end only the backend holds. End of file means that the backend has ended in any
way: then every process of the job is killed and its shared memory removed. After an orderly end there is nothing left
to find.
"""

import pathlib
import signal
import sys

from megatronapp_operator.backends.process import job_processes
from megatronapp_operator.backends.process.state.paths import shm_prefix

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    """Wait for the backend's end, then clean up; return the exit code."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    uid, shm = sys.argv[1], pathlib.Path(sys.argv[2])
    sys.stdin.buffer.read()
    swept = job_processes.sweep(job_processes.ProcessSelector(uid=uid))
    job_processes.remove_shared_memory(shm, shm_prefix(uid))
    return 0 if swept else 1


if __name__ == "__main__":
    sys.exit(main())
