"""Relay of MegaScope's frames from the ranks' Unix socket to the hub, unchanged.

Nothing is dropped here: while the hub does not take what waits, no more is read. Ranks drop what exceeds their memory
and report it.
"""

import asyncio
import contextlib
import logging
import os
import pathlib
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

import cachetools

from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import PREFIX, Frame, FrameType
from megatronapp_common.scope.protocol import ENDED_STATES, MAX_PART_BYTES, SOCKET

LOG = logging.getLogger(__name__)
LIMIT_BYTES = 8 << 20
MAX_RUNS = 32
MAX_ENDED = 32
"""Last states of ended runs that are sent again after a reconnect: the first copy may have been lost."""
RANK_TYPES = range(FrameType.SCOPE_PUBLISHER, FrameType.SCOPE_HELLO)
"""Frame types that ranks may send, unassigned numbers included."""
TYPE_BYTE = 5
"""Offset of the type in an encoded frame."""
HELLOS = frozenset({FrameType.SCOPE_PUBLISHER, FrameType.TRAINING_RANK})
"""First frames of ranks, which say what they publish."""
NOTED = HELLOS | {FrameType.SCOPE_RUN_STATE, FrameType.SCOPE_LEFT}


class ScopeBuffer:
    """Queue of frames for the hub, in order. A caller of `push` awaits `wait_for_space` before the next one."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._frames: deque[bytes] = deque()
        self._room = asyncio.Event()
        self._room.set()
        self.held_bytes = 0

    def push(self, data: bytes) -> None:
        """Append a frame, even beyond the limit."""
        self._frames.append(data)
        self._count(len(data))

    def pop(self) -> bytes | None:
        """Remove and return the oldest frame; None if the queue is empty."""
        if not self._frames:
            return None
        data = self._frames.popleft()
        self._count(-len(data))
        return data

    async def wait_for_space(self) -> None:
        """Wait until fewer bytes than the limit are queued."""
        await self._room.wait()

    def _count(self, added_bytes: int) -> None:
        self.held_bytes += added_bytes
        if self.held_bytes < self._limit:
            self._room.set()
        else:
            self._room.clear()


class ScopeResumeState:
    """Frames that a restarted hub needs again: hellos, running runs, and the runs that ended last. Pure."""

    def __init__(self) -> None:
        self._hellos: dict[int, bytes] = {}
        self._runs: cachetools.FIFOCache[str, bytes] = cachetools.FIFOCache(MAX_RUNS)
        self._ended: cachetools.FIFOCache[str, bytes] = cachetools.FIFOCache(MAX_ENDED)

    def note(self, frame: Frame, data: bytes) -> None:
        """Record a frame that is sent to the hub."""
        if frame.type in HELLOS:
            self._hellos[frame.header["rank"]] = data
        elif frame.type == FrameType.SCOPE_RUN_STATE:
            self._note_run(frame, data)
        elif frame.type == FrameType.SCOPE_LEFT:
            self._forget(frame.header["rank"])

    def _note_run(self, frame: Frame, data: bytes) -> None:
        run, ended = str(frame.header.get("run")), str(frame.header.get("state")) in ENDED_STATES
        self._runs.pop(run, None)
        self._ended.pop(run, None)
        (self._ended if ended else self._runs)[run] = data

    def _forget(self, rank: int) -> None:
        """Remove a rank that has ended; with rank 0 all running runs."""
        self._hellos.pop(rank, None)
        if rank == 0:
            self._runs.clear()

    def frames(self) -> Iterator[bytes]:
        """Yield the frames to send again."""
        yield from self._hellos.values()
        yield from self._ended.values()
        yield from self._runs.values()


class ScopeSocket:
    """Unix socket that accepts connections of ranks. `wake` is called when `buffer` has a new frame."""

    def __init__(self, directory: pathlib.Path, wake: Callable[[], None]) -> None:
        self._directory = directory
        self._wake = wake
        self.buffer = ScopeBuffer()
        self.standing = ScopeResumeState()
        self._tasks: set[asyncio.Task[None]] = set()
        self._speaks: dict[int, asyncio.Task[None]] = {}
        """Connection of each rank; after a reconnect the newest one."""

    def pop(self) -> bytes | None:
        """Return the next frame for the hub; None if the queue is empty."""
        data = self.buffer.pop()
        if data is not None and data[TYPE_BYTE] in NOTED:
            self.standing.note(frames.decode(data), data)
        return data

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen inside the context. Without a socket the agent only logs a warning, because training matters more."""
        try:
            listener = listening(self._directory)
        except OSError as error:
            LOG.warning("%s: no MegaScope of this worker: %s", self._directory / SOCKET, error)
            yield
            return
        server = await asyncio.start_unix_server(self._accept, sock=listener)
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            with contextlib.suppress(OSError):
                (self._directory / SOCKET).unlink()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._read(reader, task)
        except FrameError as error:
            LOG.warning("a rank is not listened to any more: %s", error)
        except (asyncio.IncompleteReadError, ConnectionError):
            LOG.debug("a rank disconnected")
        finally:
            self._tasks.discard(task)
            for rank in [rank for rank, speaker in self._speaks.items() if speaker is task]:
                del self._speaks[rank]
                self._announce_left(rank)
            writer.close()

    def _announce_left(self, rank: int) -> None:
        """Queue a LEFT frame for the hub, after all frames of the rank."""
        self.buffer.push(frames.encode(Frame(FrameType.SCOPE_LEFT, {"rank": rank})))
        self._wake()

    async def _read(self, reader: asyncio.StreamReader, task: asyncio.Task[None]) -> None:
        """Queue frames until the stream ends, and record who sends. Raises FrameError for bytes that are no frame."""
        while True:
            await self.buffer.wait_for_space()
            prefix = await reader.readexactly(PREFIX.size)
            length = frames.frame_length(prefix)
            data = prefix + await reader.readexactly(length - PREFIX.size)
            frame = frames.decode(data)
            if frame.type not in RANK_TYPES:
                raise FrameError(f"frame type {frame.type} is none that ranks send")
            if length > MAX_PART_BYTES:
                LOG.warning("a frame of %d bytes is dropped; ranks send at most %d", length, MAX_PART_BYTES)
                data = _mark(frame)
            if frame.type in HELLOS:
                self._speaks[_rank(frame)] = task
            self.buffer.push(data)
            self._wake()


def _mark(frame: Frame) -> bytes:
    """Return the frame of a part that is too large, without its tensors and marked as dropped.

    Raises FrameError for other types, which ranks never make as large.
    """
    if frame.type != FrameType.SCOPE_PART:
        raise FrameError(f"a frame of type {frame.type} is larger than any may be")
    return frames.encode(Frame(frame.type, {**frame.header, "tensors": [], "dropped": True}))


def _rank(frame: Frame) -> int:
    rank = frame.header.get("rank")
    if not isinstance(rank, int):
        raise FrameError("first frame of a rank: rank is not a number")
    return rank


def listening(directory: pathlib.Path) -> socket.socket:
    """Listen at `directory`/scope.sock, for this user and group. Raises OSError.

    The path appears when connections are accepted, because a bound socket that does not listen yet refuses them. It may
    be longer than the address of a socket can be.
    """
    path, hidden = directory / SOCKET, directory / f".{SOCKET}"
    hidden.unlink(missing_ok=True)
    folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"/proc/self/fd/{folder}/{hidden.name}")
        hidden.chmod(0o660)
        sock.listen()
        hidden.replace(path)
    except OSError:
        sock.close()
        hidden.unlink(missing_ok=True)
        raise
    finally:
        os.close(folder)
    return sock
