"""Order to a worker to continue with another attempt in the same pod, and the names that depend on the attempt.

A backend writes the order into a file (`Env.ATTEMPT_FILE`), which launcher and agent read at intervals. On Kubernetes
it is the annotation `ANNOTATION_RESTART`, which the kubelet writes into a volume. Its text is `ATTEMPT SECONDS`; where
spares may have taken places, `ATTEMPT SECONDS WORKER COORDINATOR`; and `checkpoint` after that asks the ranks of this
very attempt to end with their next checkpoint, `continue` that they no longer do.
"""

import dataclasses
import fcntl
import os
import pathlib
from typing import Self

POLL_S = 0.25
"""Seconds between two reads of the file."""
CHECKPOINT = "checkpoint"
"""Last field of an order to end with the next checkpoint."""
CONTINUE = "continue"
"""Last field of an order to end with the next checkpoint that is withdrawn."""
NO_COORDINATOR = "-"
"""Coordinator in the order of a gang of one worker."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOrder:
    """The newest attempt that a worker is to run."""

    attempt: int
    grace_s: float
    """Seconds that the ranks of an earlier attempt have to save and end."""
    worker: int | None = None
    """Place that the worker has in the gang from this attempt on; None: the one that it has."""
    coordinator: str | None = None
    """host:port where worker 0 gathers the gang from this attempt on; None: where it gathered before."""
    at_checkpoint: bool = False
    """True if the ranks of `attempt` are to end once they have written their next checkpoint."""
    withdrawn: bool = False
    """True if they had the order to end so, and are to continue."""

    @property
    def text(self) -> str:
        """The order as it is written."""
        placed = [] if self.worker is None else [f"{self.worker}", self.coordinator or NO_COORDINATOR]
        last = [CHECKPOINT] if self.at_checkpoint else [CONTINUE] if self.withdrawn else []
        return " ".join([f"{self.attempt} {self.grace_s:g}", *placed, *last])

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the order in a text; None if it has none."""
        fields = text.split()
        at_checkpoint, withdrawn = fields[-1:] == [CHECKPOINT], fields[-1:] == [CONTINUE]
        try:
            match fields[:-1] if at_checkpoint or withdrawn else fields:
                case [attempt, grace] if attempt.isdecimal():
                    return cls(
                        attempt=int(attempt),
                        grace_s=max(0.0, float(grace)),
                        at_checkpoint=at_checkpoint,
                        withdrawn=withdrawn,
                    )
                case [attempt, grace, worker, where] if attempt.isdecimal() and worker.isdecimal():
                    return cls(
                        attempt=int(attempt),
                        grace_s=max(0.0, float(grace)),
                        worker=int(worker),
                        coordinator=None if where == NO_COORDINATOR else where,
                        at_checkpoint=at_checkpoint,
                        withdrawn=withdrawn,
                    )
        except ValueError:
            return None
        return None


def read_order(path: pathlib.Path, *, after: int) -> AttemptOrder | None:
    """Return the order in a file if it is for a later attempt than `after`; None without such an order."""
    order = _read(path)
    return order if order is not None and order.attempt > after else None


def ends_at_checkpoint(path: pathlib.Path, *, attempt: int) -> bool:
    """Return True if the ranks of this attempt are to end with their next checkpoint."""
    order = _read(path)
    return order is not None and order.attempt == attempt and order.at_checkpoint


def _read(path: pathlib.Path) -> AttemptOrder | None:
    try:
        return AttemptOrder.parse(path.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None


def prefix_at(prefix: str, attempt: int, *, before: int, worker: int, place: int | None = None) -> str:
    """Return the prefix of a worker's files in shared memory in `attempt`, given that of the attempt `before`.

    `place`: index of the worker in `attempt`; None: that of before.
    """
    return f"{prefix.removesuffix(_suffix(before, worker))}{_suffix(attempt, worker if place is None else place)}"


def _suffix(attempt: int, worker: int) -> str:
    return f"-a{attempt}-w{worker}"


def lock_path(directory: pathlib.Path, uid: str, worker: int) -> pathlib.Path:
    """Return the path of the file that a launcher locks for as long as it lives, over all its attempts.

    `worker`: index that the launcher began with.
    """
    return directory / f"megatronapp-{uid}-w{worker}.launcher"


def take_lock(path: pathlib.Path) -> int:
    """Create and lock a file for the rest of this process; return its descriptor. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # the only other locks are those of `processes.is_locked`, for an instant
    return descriptor
