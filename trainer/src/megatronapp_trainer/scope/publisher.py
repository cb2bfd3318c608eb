"""The thread that sends a rank's frames to its agent (docs/scope-protocol.md, section 5). The rank never waits for it.

What cannot be sent is held up to 8 MiB; beyond that the oldest parts go, and are counted. Nobody need listen: the
thread tries again and again, and says first who publishes.
"""

import collections
import contextlib
import pathlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType, encode

BOUND_BYTES = 8 << 20
MOST_JOBS = 256
"""Steps whose copies have not come yet; beyond, the oldest goes."""
_POLL_S = 0.001
_IDLE_S = 0.05
_RETRY_S = 0.5


class Job(Protocol):
    """Frames that are being made on the device."""

    def ready(self) -> bool:
        """They can be built without waiting."""

    def build(self) -> Iterable[Frame]:
        """The frames."""


class Ready:
    """A job of frames that are there."""

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._frames = tuple(frames)

    def ready(self) -> bool:
        """Always."""
        return True

    def build(self) -> Iterable[Frame]:
        """They."""
        return self._frames


class Publisher:
    """Sends in a thread of its own, from `start` to `close`."""

    def __init__(self, path: pathlib.Path, hello: Frame, *, bound_bytes: int = BOUND_BYTES) -> None:
        self._path = path
        self._hello = encode(hello)
        self._bound = bound_bytes
        self._jobs: collections.deque[Job] = collections.deque()
        self._outbox: collections.deque[tuple[bool, bytes]] = collections.deque()
        self._held = 0
        self._socket: socket.socket | None = None
        self._unsent: bytes | memoryview = b""
        self._news = threading.Event()
        self._until_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="scope-publisher", daemon=True)
        self.dropped = 0
        """Frames that nobody will see."""
        self.failures: collections.deque[str] = collections.deque(maxlen=8)
        """Why steps could not be told; the newest ones."""

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def post(self, job: Job) -> None:
        """Send when it is ready. Returns at once."""
        while len(self._jobs) >= MOST_JOBS:
            with contextlib.suppress(IndexError):
                self._jobs.popleft()
                self.dropped += 1
        self._jobs.append(job)
        self._news.set()

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what can be sent in this time, and end."""
        self._until_s = time.monotonic() + timeout_s
        self._news.set()
        self._thread.join(timeout_s + 1)

    @property
    def held_bytes(self) -> int:
        """That wait to be sent."""
        return self._held

    def _run(self) -> None:
        while True:
            moved = self._take() | self._send()
            if moved:
                continue
            if self._until_s is not None and (self._is_through or time.monotonic() > self._until_s):
                break
            self._rest()
        self._disconnect()

    @property
    def _is_through(self) -> bool:
        """Everything has been sent, or there is nobody to send it to."""
        return not self._jobs and (self._socket is None or not (self._outbox or self._unsent))

    def _rest(self) -> None:
        """Until there may be something to do: a full socket that drains, a copy that comes, a new job, a new try."""
        wait_s = _POLL_S if self._jobs else _IDLE_S if self._socket is not None else _RETRY_S
        if self._socket is not None and self._unsent:
            with contextlib.suppress(OSError, ValueError):
                select.select([], [self._socket], [], wait_s)
            return
        self._news.wait(wait_s)
        self._news.clear()

    def _take(self) -> bool:
        """Build what is ready; whether something was."""
        if not self._jobs or not self._jobs[0].ready():
            return False
        with contextlib.suppress(IndexError):
            self._put(self._jobs.popleft())
        return True

    def _put(self, job: Job) -> None:
        try:
            frames = [(frame.type == FrameType.SCOPE_PART, encode(frame)) for frame in job.build()]
        except (FrameError, ValueError, RuntimeError) as error:
            self.failures.append(str(error))
            self.dropped += 1
            return
        for is_part, data in frames:
            self._outbox.append((is_part, data))
            self._held += len(data)
        self._make_room()

    def _make_room(self) -> None:
        """Parts go first, the oldest of them; when there are none left, whatever is oldest."""
        for only_parts in (True, False):
            kept: collections.deque[tuple[bool, bytes]] = collections.deque()
            while self._held > self._bound and self._outbox:
                is_part, data = self._outbox.popleft()
                if only_parts and not is_part:
                    kept.append((is_part, data))
                    continue
                self._held -= len(data)
                self.dropped += 1
            self._outbox.extendleft(reversed(kept))

    def _send(self) -> bool:
        """Send some bytes without waiting; whether some went."""
        if not self._outbox and not self._unsent and self._socket is not None:
            return False
        if self._socket is None and not self._connect():
            return False
        assert self._socket is not None
        if not self._unsent:
            if not self._outbox:
                return False
            _, data = self._outbox.popleft()
            self._unsent = memoryview(data)
            self._held -= len(data)
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return False
        except OSError:
            self._disconnect()
            return False
        self._unsent = self._unsent[sent:]
        return True

    def _connect(self) -> bool:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            return False
        self._socket, self._unsent = connection, self._hello
        return True

    def _disconnect(self) -> None:
        """What was cut off is lost; who comes next hears whole frames only."""
        if self._socket is not None:
            self._socket.close()
        if self._unsent and self._unsent != self._hello:
            self.dropped += 1
        self._socket, self._unsent = None, b""


Sink = Callable[[Job], None]
