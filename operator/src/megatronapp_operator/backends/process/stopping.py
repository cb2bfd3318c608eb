"""Ends the backend of another process."""

import os
import signal
import time

from megatronapp_common.processes import is_locked
from megatronapp_operator.backends.process import signals
from megatronapp_operator.backends.process.state import files
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.backends.process.state.registry import JobView
from megatronapp_operator.errors import BackendError

POLL_S = 0.05
KILL_AFTER_S = 20.0
"""Seconds for a backend to end after a stop without a checkpoint was requested."""


def stop_backend(job: JobView, *, force: bool) -> None:
    """End the backend: request a stop, then one without a checkpoint, then kill it.

    Raises BackendError if it cannot be killed.
    """
    if not force:
        _signal(job.paths, signal.SIGTERM)
        if _ended(job.paths, grace_s(job) + KILL_AFTER_S):
            return
    _signal(job.paths, signals.FORCING)
    if _ended(job.paths, KILL_AFTER_S):
        return
    _signal(job.paths, signal.SIGKILL)
    if not _ended(job.paths, KILL_AFTER_S):
        raise BackendError(f"{job.name}: the backend cannot be killed; see {job.paths.backend}")


def grace_s(job: JobView) -> float:
    """Return the seconds that the job gives its workers for a checkpoint."""
    return float(job.document["spec"].get("runPolicy", {}).get("terminationGracePeriodSeconds", 600))


def _signal(paths: JobPaths, number: signal.Signals) -> None:
    """Signal the backend, if it is still the process of which we read."""
    document = files.read_json(paths.backend)
    if document is None:
        return
    try:
        fd = os.pidfd_open(document["pid"])
    except ProcessLookupError:
        return
    with os.fdopen(fd, "rb", buffering=0):
        if is_locked(paths.lock):
            signal.pidfd_send_signal(fd, number)
            signal.pidfd_send_signal(fd, signal.SIGCONT)  # one that was stopped could not answer


def _ended(paths: JobPaths, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_locked(paths.lock):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
