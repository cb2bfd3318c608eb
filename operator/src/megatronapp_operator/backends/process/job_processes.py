"""Discovery of the processes of a job by what they inherit: their environment.

A process can leave its group and its parent (setsid, a parent that dies), but no other process can change its
environment. Signals are sent through a pidfd that was opened before the environment was read, so a reused pid is never
hit.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Iterator

from megatronapp_common.names import Env

PROC = pathlib.Path("/proc")
POLL_S = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSelector:
    """Selection of processes: those of a job, of one attempt of it, or of one worker of that."""

    uid: str
    attempt: int | None = None
    worker: int | None = None

    def matches(self, environment: bytes) -> bool:
        """Return True if a process with this environment (NUL separated) is selected."""
        required = {Env.JOB_UID: self.uid, Env.ATTEMPT: self.attempt, Env.WORKER_INDEX: self.worker}
        entries = set(environment.split(b"\0"))
        return all(f"{name}={value}".encode() in entries for name, value in required.items() if value is not None)


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def _environment(pid: int) -> bytes:
    """Return the environment of a process, empty if it has ended or is not ours."""
    try:
        return (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return b""


def find(selector: ProcessSelector) -> list[int]:
    """Return the pids of the selected living processes, without this one."""
    me = os.getpid()
    return [pid for pid in _pids() if pid != me and selector.matches(_environment(pid))]


def send(selector: ProcessSelector, number: signal.Signals) -> int:
    """Signal every selected process; return their number."""
    count = 0
    for pid in find(selector):
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(fd, "rb", buffering=0):
            if selector.matches(_environment(pid)):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, number)
                    count += 1
    return count


def sweep(selector: ProcessSelector, deadline_s: float = 10.0) -> bool:
    """Kill until none is left: a process may have forked while the list was read. Return False if some are left."""
    end = time.monotonic() + deadline_s
    while send(selector, signal.SIGKILL):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def remove_shared_memory(folder: pathlib.Path, prefix: str) -> list[str]:
    """Remove the files of `folder` that begin with `prefix`; return their names."""
    found = [path for path in folder.iterdir() if path.name.startswith(prefix)]
    for path in found:
        path.unlink(missing_ok=True)
    return [path.name for path in found]
