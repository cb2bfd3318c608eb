"""The thread that sends a rank's frames to its agent (docs/scope-protocol.md, section 5). The rank never waits for it.

Steps wait in the host's memory as the device wrote them; frames are made of them one by one, when the one before has
been sent. A job without space is dropped when it is posted, and marks replace it. The agent need not listen: the thread
tries to connect again and again, and sends PUBLISHER first.
"""

import collections
import contextlib
import enum
import errno
import logging
import os
import pathlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType, encode
from megatronapp_common.scope.protocol import MAX_PART_BYTES
from megatronapp_trainer.device.idle_window import IdleWindow

log = logging.getLogger(__name__)
BOUND_BYTES = 8 << 20
"""Limit of waiting decode steps (a single one may be larger); the same again of tokens, run states and marks."""
WAITING_BYTES = 256 << 20
"""Limit of waiting prompts and probes."""
FRAME_COST = 1 << 10
"""Overhead of each waiting job, in addition to its numbers."""
MOST_COMING = 256
"""Jobs whose device memory is freed as soon as they are copied; that of later ones is freed when they are sent."""
_NOT_LISTENING = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN})
"""Errors of a connection while the agent does not listen yet, has ended, or is busy."""
_POLL_S = 0.001
_IDLE_S = 0.05
_RETRY_S = 0.5
_ABSENT_S = 60.0
"""Time without an agent after which the log says so; after a crash it listens again sooner."""
_IDLE_WINDOW_S = 0.05
"""Each step has an idle window; after this time without one the thread works at any time."""
_MAX_LAG_STEPS = 8


class DropPolicy(enum.Enum):
    """How something that waits may be dropped."""

    STEP = "step"
    """A decode step: the oldest is dropped first."""
    NEWS = "news"
    """Tokens, states, marks: the oldest is dropped, once the agent has not read for long."""
    PROMPTS = "prompts"
    """A prompt: waits, and is dropped only if there is no space when it is posted."""
    PROBE = "probe"
    """A probe: as a prompt, in a separate queue."""


class FrameJob(Protocol):
    """Frames that are being made on the device."""

    @property
    def kind(self) -> DropPolicy:
        """How it may be dropped."""

    @property
    def nbytes(self) -> int:
        """Size in the host's memory."""

    def split(self) -> "Sequence[FrameJob]":
        """Parts of it that are dropped in different ways."""

    def ready(self) -> bool:
        """Return true if the frames can be built without waiting."""

    def build(self) -> Iterable[Frame]:
        """The frames, which may be made one by one."""

    def marks(self) -> Sequence[Frame]:
        """Build frames that replace those that have not been built."""


class ReadyFrames:
    """A job of frames that are there."""

    def __init__(self, frames: Iterable[Frame]) -> None:
        self._frames = tuple(frames)

    @property
    def kind(self) -> DropPolicy:
        """Policy of small frames."""
        return DropPolicy.NEWS

    @property
    def nbytes(self) -> int:
        """Size of all bodies."""
        return sum(len(frame.body) for frame in self._frames)

    def split(self) -> "Sequence[FrameJob]":
        """Return this job: all of it is dropped alike."""
        return [self]

    def ready(self) -> bool:
        """Return true: the frames exist."""
        return True

    def build(self) -> Iterable[Frame]:
        """Return the frames, which exist already."""
        return self._frames

    def marks(self) -> Sequence[Frame]:
        """Return nothing: parts without numbers are no longer than marks."""
        return ()


class PartNumberer:
    """Numbers the parts of each step and probe of a rank, in the order in which they are sent."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._next: collections.OrderedDict[object, int] = collections.OrderedDict()

    def numbered(self, frame: Frame) -> Frame:
        """The frame with its number; frames that are no parts as they are."""
        if frame.type != FrameType.SCOPE_PART:
            return frame
        number = self._next.get(_key(frame), 0)
        return Frame(frame.type, {**frame.header, "part": number}, frame.body)

    def commit(self, frame: Frame) -> None:
        """This frame is sent: the next one has another number."""
        if frame.type != FrameType.SCOPE_PART:
            return
        number = self._next.pop(_key(frame), 0)
        if frame.header.get("more"):
            self._next[_key(frame)] = number + 1
        while len(self._next) > self._most:  # runs that were cancelled in their prefill
            self._next.popitem(last=False)


def _key(frame: Frame) -> object:
    """The step or probe of a part."""
    header = frame.header
    return header.get("probe") or (header.get("run"), header.get("step"))


class FrameQueue:
    """Jobs that wait, in bounded memory. Any thread may put, one takes; both are short."""

    def __init__(self, bound_bytes: int, waiting_bytes: int) -> None:
        self._bounds = {
            DropPolicy.STEP: bound_bytes,
            DropPolicy.NEWS: bound_bytes,
            DropPolicy.PROMPTS: waiting_bytes,
            DropPolicy.PROBE: waiting_bytes,
        }
        self._queued_bytes = dict.fromkeys(DropPolicy, 0)
        self._queues: dict[bool, collections.OrderedDict[int, FrameJob]] = {
            False: collections.OrderedDict(),
            True: collections.OrderedDict(),
        }
        """By whether they are probes, and their number."""
        self._steps: collections.deque[int] = collections.deque()
        self._count = 0
        self._lock = threading.Lock()
        self.dropped = 0

    def put(self, job: FrameJob) -> None:
        """Queue a job, or its marks if it does not fit; drop older steps that no longer fit."""
        with self._lock:
            queue = self._queues[job.kind is DropPolicy.PROBE]
            if job.kind in {DropPolicy.PROMPTS, DropPolicy.PROBE} and not self._fits(job):
                self.dropped += 1
                job = ReadyFrames(job.marks())
            self._count += 1
            self._set(queue, self._count, job)
            if job.kind is DropPolicy.STEP:
                self._steps.append(self._count)
            self._drop_steps(self._queues[False])
            self._drop_oldest(self._queues[False])

    def take(self, *, probes: bool) -> FrameJob | None:
        """Take the oldest job, if it is ready. Its size is counted until `release`."""
        with self._lock:
            queue = self._queues[probes]
            if not queue or not next(iter(queue.values())).ready():
                return None
            number, job = queue.popitem(last=False)
            while self._steps and not probes and self._steps[0] <= number:
                self._steps.popleft()
            return job

    def release(self, kind: DropPolicy, cost: int) -> None:
        """Free the space of a job that was taken."""
        with self._lock:
            self._queued_bytes[kind] -= cost

    @property
    def queued_bytes(self) -> int:
        """Size of all waiting jobs."""
        return sum(self._queued_bytes.values())

    @property
    def count(self) -> int:
        """Number of waiting jobs."""
        return sum(map(len, self._queues.values()))

    def _fits(self, job: FrameJob) -> bool:
        """Return true if the job fits. One larger than the limit may wait alone, as it would never fit otherwise."""
        prompt_bytes = self._queued_bytes[DropPolicy.PROMPTS] + self._queued_bytes[DropPolicy.PROBE]
        return not prompt_bytes or prompt_bytes + cost_of(job) <= self._bounds[job.kind]

    def _set(self, queue: collections.OrderedDict[int, FrameJob], number: int, job: FrameJob) -> None:
        if number in queue:
            self._queued_bytes[queue[number].kind] -= cost_of(queue[number])
        queue[number] = job
        self._queued_bytes[job.kind] += cost_of(job)

    def _drop_steps(self, queue: collections.OrderedDict[int, FrameJob]) -> None:
        """Replace the oldest steps by their marks, but never the newest step."""
        while self._queued_bytes[DropPolicy.STEP] > self._bounds[DropPolicy.STEP] and len(self._steps) > 1:
            if (number := self._steps.popleft()) in queue:
                self.dropped += 1
                self._set(queue, number, ReadyFrames(queue[number].marks()))

    def _drop_oldest(self, queue: collections.OrderedDict[int, FrameJob]) -> None:
        """Drop the oldest tokens and states, once the agent has not read for long."""
        if self._queued_bytes[DropPolicy.NEWS] <= self._bounds[DropPolicy.NEWS]:
            return
        for number in [number for number, job in queue.items() if job.kind is DropPolicy.NEWS][:-1]:
            if self._queued_bytes[DropPolicy.NEWS] <= self._bounds[DropPolicy.NEWS] * 3 // 4:  # not one by one
                return
            self._queued_bytes[DropPolicy.NEWS] -= cost_of(queue.pop(number))
            self.dropped += 1


def cost_of(job: FrameJob) -> int:
    """Return the bytes that a waiting job is charged."""
    return job.nbytes + FRAME_COST


class FramePublisher:
    """Sends frames in a thread, from `start` to `close`."""

    def __init__(
        self,
        path: pathlib.Path,
        hello: Frame,
        *,
        bound_bytes: int = BOUND_BYTES,
        waiting_bytes: int = WAITING_BYTES,
        idle_window: IdleWindow | None = None,
    ) -> None:
        """`idle_window`: the thread works within it; None: at any time."""
        self._path = path
        self._window = idle_window
        self._hello = encode(hello)
        self._waiting = FrameQueue(bound_bytes, waiting_bytes)
        self._coming: collections.deque[FrameJob] = collections.deque(maxlen=MOST_COMING)
        self._frames = {False: self._next_frames(probes=False), True: self._next_frames(probes=True)}
        self._is_probe_next = True
        self._is_overdue = False
        """True after a time without an idle window: the thread sends all that is ready."""
        self._numbers = PartNumberer()
        self._socket: socket.socket | None = None
        self._absent_since_s: float | None = None
        """When the agent was first found not to listen, since the last connection."""
        self._frame = b""
        """The frame that is being sent. After a lost connection all of it is sent again."""
        self._unsent = memoryview(b"")
        self._wake_up = threading.Event()
        if idle_window is not None:
            idle_window.listeners.append(self._wake_up.set)
        self._until_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="scope-publisher", daemon=True)
        self.failures: collections.deque[str] = collections.deque(maxlen=8)
        """The newest reasons why steps could not be sent."""

    def start(self) -> None:
        """Start the thread that sends."""
        self._thread.start()

    def post(self, job: FrameJob) -> None:
        """Send when it is ready. Returns at once."""
        self._coming.append(job)
        for part in job.split():
            self._waiting.put(part)
        if self._may_work:  # otherwise the idle window wakes it
            self._wake_up.set()

    def close(self, timeout_s: float = 1.0) -> None:
        """Send what can be sent in this time, and end."""
        self._until_s = time.monotonic() + timeout_s
        self._wake_up.set()
        self._thread.join(timeout_s + 1)

    @property
    def queued_bytes(self) -> int:
        """Size of all jobs that wait to be sent."""
        return self._waiting.queued_bytes

    @property
    def dropped(self) -> int:
        """Number of steps, prompts and probes that marks replaced, and of tokens and states that were dropped."""
        return self._waiting.dropped

    def _run(self) -> None:
        while True:
            self._await_idle_window()
            while self._coming and self._coming[0].ready():  # what has come lets its memory on the device go
                self._coming.popleft()
            if self._send():
                continue
            self._is_overdue = False
            if self._until_s is not None and (self._is_through or time.monotonic() > self._until_s):
                break
            self._rest()
        self._disconnect()

    @property
    def _is_through(self) -> bool:
        """True if everything has been sent, or there is no connection."""
        return self._socket is None or not (self._waiting.queued_bytes or self._unsent)

    @property
    def _may_work(self) -> bool:
        """True within the idle window, or if the queue is long because the device waits for the host."""
        is_urgent = self._is_overdue or self._until_s is not None or self._waiting.count > _MAX_LAG_STEPS
        return self._window is None or self._window.is_on or is_urgent

    def _await_idle_window(self) -> None:
        while not self._may_work:
            self._is_overdue = not self._wake_up.wait(_IDLE_WINDOW_S)
            self._wake_up.clear()

    def _rest(self) -> None:
        """Wait until there may be work: a socket that drains, a copy that is ready, a new job, or time to connect."""
        wait_s = _POLL_S if self._coming else _IDLE_S if self._socket is not None else _RETRY_S
        if self._socket is not None and self._unsent:
            with contextlib.suppress(OSError, ValueError):
                select.select([], [self._socket], [], wait_s)
            return
        self._wake_up.wait(wait_s)
        self._wake_up.clear()

    def _send(self) -> bool:
        """Send some bytes without waiting; whether some went."""
        if self._socket is None and not self._connect():
            return False
        assert self._socket is not None
        if not self._unsent:
            if (data := self._next()) is None:
                return False
            self._frame, self._unsent = data, memoryview(data)
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return False
        except OSError:
            self._disconnect()
            return False
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._frame = b""
        return True

    def _next(self) -> bytes | None:
        """The next frame: steps and probes take turns."""
        for _ in self._frames:
            self._is_probe_next = not self._is_probe_next
            if (data := next(self._frames[self._is_probe_next])) is not None:
                return data
        return None

    def _next_frames(self, *, probes: bool) -> Iterator[bytes | None]:
        """Give the frames of one queue without end; None if nothing is ready."""
        while True:
            if (job := self._waiting.take(probes=probes)) is None:
                yield None
                continue
            cost, kind = cost_of(job), job.kind
            try:
                for frame in job.build():
                    yield self._encoded(frame)
            except Exception as error:  # whatever it is, those after it must be told
                self._note(str(error))
                self._waiting.dropped += 1
                for mark in job.marks():
                    yield self._encoded(mark)
            del job
            self._waiting.release(kind, cost)

    def _note(self, failure: str) -> None:
        """Log a failure once, as it may repeat at each step."""
        if failure not in self.failures:
            log.warning("a step cannot be shown: %s", failure)
            self.failures.append(failure)

    def _encoded(self, frame: Frame) -> bytes:
        data = encode(self._numbers.numbered(frame))
        if len(data) > MAX_PART_BYTES:
            raise FrameError(f"a frame of {len(data)} bytes; ranks send at most {MAX_PART_BYTES}")
        self._numbers.commit(frame)
        return data

    def _connect(self) -> bool:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connect_to(connection, self._path)
        except OSError as error:
            connection.close()
            if error.errno not in _NOT_LISTENING:
                self._note(f"no connection to {self._path}: {error}")
            elif self._absent_since_s is None:
                self._absent_since_s = time.monotonic()
            elif time.monotonic() - self._absent_since_s >= _ABSENT_S:
                self._note(f"no agent has listened at {self._path} for {_ABSENT_S:.0f} s; see the log of the agent")
            return False
        self._absent_since_s = None
        self._socket, self._unsent = connection, memoryview(self._hello + self._frame)
        return True

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def connect_to(connection: socket.socket, path: pathlib.Path) -> None:
    """Connect to a Unix socket. Its path may be longer than the 107 bytes of a socket's address. Raises OSError."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


Sink = Callable[[FrameJob], None]
