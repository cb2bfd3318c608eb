"""Order to a worker to continue with another attempt in the same pod, and the names that depend on the attempt.

A backend writes the order into a file (`Env.ATTEMPT_FILE`), which launcher and agent read at intervals. On Kubernetes
it is the annotation `ANNOTATION_RESTART`, which the kubelet writes into a volume.
"""

import dataclasses
import fcntl
import os
import pathlib
from typing import Self

POLL_S = 0.25
"""Seconds between two reads of the file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOrder:
    """The newest attempt that a worker is to run."""

    attempt: int
    grace_s: float
    """Seconds that the ranks of an earlier attempt have to save and end."""

    @property
    def text(self) -> str:
        """The order as it is written: attempt and seconds."""
        return f"{self.attempt} {self.grace_s:g}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the order in a text; None if it has none."""
        match text.split():
            case [attempt, grace] if attempt.isdecimal():
                try:
                    return cls(attempt=int(attempt), grace_s=max(0.0, float(grace)))
                except ValueError:
                    return None
        return None


def read_order(path: pathlib.Path, *, after: int) -> AttemptOrder | None:
    """Return the order in a file if it is for a later attempt than `after`; None without such an order."""
    try:
        order = AttemptOrder.parse(path.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    return order if order is not None and order.attempt > after else None


def prefix_at(prefix: str, attempt: int, *, before: int, worker: int) -> str:
    """Return the prefix of a worker's files in shared memory in `attempt`, given that of the attempt `before`."""
    return f"{prefix.removesuffix(_suffix(before, worker))}{_suffix(attempt, worker)}"


def _suffix(attempt: int, worker: int) -> str:
    return f"-a{attempt}-w{worker}"


def lock_path(directory: pathlib.Path, uid: str, worker: int) -> pathlib.Path:
    """Return the path of the file that a launcher locks for as long as it lives, over all its attempts."""
    return directory / f"megatronapp-{uid}-w{worker}.launcher"


def take_lock(path: pathlib.Path) -> int:
    """Create and lock a file for the rest of this process; return its descriptor. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # the only other locks are those of `processes.is_locked`, for an instant
    return descriptor
