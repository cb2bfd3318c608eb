"""Writing of a job's status and Events, on a disk that may be full."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from megatronapp_common.text.times import rfc3339
from megatronapp_operator.backends.process.state import files
from megatronapp_operator.backends.process.state.paths import JobPaths
from megatronapp_operator.plan import RecordEvent


class StateWriter:
    """Writer of one job's state. An outdated state is no reason to end the training: the next write catches up."""

    def __init__(self, paths: JobPaths) -> None:
        self._paths = paths
        self.unwritable: set[pathlib.Path] = set()
        """Files whose last write failed."""
        self._unwritten_events: list[dict[str, Any]] = []
        """Events that are not yet in their file."""

    def write_status(self, document: dict[str, Any]) -> None:
        """Write the status, and the Events that a full disk has delayed."""
        with self._full_disk_tolerated(self._paths.status):
            files.write_json(self._paths.status, document)
        if self._unwritten_events:
            self._write_events()

    def record(self, event: RecordEvent, now: float) -> None:
        """Add an Event to the file of Events, once there is space."""
        fields = {"type": event.type.value, "reason": event.reason, "message": event.message}
        self._unwritten_events.append({"time": rfc3339(now), **fields})
        self._write_events()

    def warn(self, message: str) -> None:
        """Print to standard error, which may be a file on the full disk."""
        with contextlib.suppress(OSError):
            print(f"warning: {self._paths.root}: {message}", file=sys.stderr, flush=True)

    def _write_events(self) -> None:
        with self._full_disk_tolerated(self._paths.events):
            files.append_json(self._paths.events, self._unwritten_events)
            self._unwritten_events.clear()

    @contextlib.contextmanager
    def _full_disk_tolerated(self, path: pathlib.Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if path not in self.unwritable:
                self.warn(f"the state cannot be written: {error}")
            self.unwritable.add(path)
        else:
            self.unwritable.discard(path)
