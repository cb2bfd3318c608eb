"""Broker between the HTTP thread and the engine's thread: requests in, events out, neither blocks the other.

The event loop of HTTP calls `submit` and `cancel`; the engine's thread calls `open`, `step`, `close`. Each handle has a
queue in the event loop, which the engine's thread fills.
"""

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from megatronapp_trainer.inference.errors import GenerationError, QueueFullError
from megatronapp_trainer.inference.events import Event, FinishedEvent, PromptEvent, TokenEvent
from megatronapp_trainer.inference.request import GenerationRequest
from megatronapp_trainer.serve.errors import NotReadyError, SlowReaderError, StoppingError
from megatronapp_trainer.serve.statistics import ServerStatistics

if TYPE_CHECKING:
    from megatronapp_trainer.inference.engine import Engine

MAX_BUFFERED = 4096
"""Events of an answer that may wait for its reader, besides those that the connection buffers."""
MOST_PROBED = 48
"""Limit of open prompts of the background, which are not counted in `most_open`. A hub requests 36 probes at a time,
nearly all of one prompt, some of eight.
"""
MOST_OPEN_LOGPROBS = 1 << 20
"""Limit of the log-probabilities of all open answers in memory: as many as two of the largest answers have."""


@dataclasses.dataclass(frozen=True, slots=True)
class QueueEvent:
    """Number of prompts that wait before the first waiting one of a handle; None: none of it waits any more."""

    position: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class PromptProgress:
    """Result of one step for the positions of a prompt: one item for any number of them."""

    request_id: str
    readings: tuple[PromptEvent, ...]


class Disconnected:
    """The client has disconnected."""


Item = PromptProgress | TokenEvent | FinishedEvent | QueueEvent | Disconnected
Observer = Callable[[Sequence[Event]], None]
"""Callback in the engine's thread for the events of a step."""


class RequestHandle:
    """The prompts of one HTTP request. Created and read in the event loop.

    A reader that is too slow gets an error after the queued events, and `too_slow` is called once.
    """

    def __init__(
        self, requests: Sequence[GenerationRequest], too_slow: Callable[["RequestHandle"], None], logprobs: int = 0
    ) -> None:
        self.logprobs = logprobs
        """Log-probabilities of its answer in memory."""
        self.ids = tuple(request.id for request in requests)
        self.is_background = any(request.is_background for request in requests)
        self.position: int | None = None
        self._too_slow = too_slow
        self._is_full = False
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, items: Sequence[Item]) -> None:
        """Queue items, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, tuple(items))

    async def get(self, timeout_s: float | None = None) -> Item | None:
        """Return the next item; None if there was none within the time, in seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._items.get()
        except TimeoutError:
            return None

    def _put(self, items: tuple[Item, ...]) -> None:
        if self._is_full:
            return
        if self._items.qsize() + len(items) > MAX_BUFFERED:
            self._is_full = True
            items = tuple(map(_end_slow_reader, self.ids))
            self._too_slow(self)
        for item in items:
            self._items.put_nowait(item)


def _end_slow_reader(request_id: str) -> FinishedEvent:
    error = SlowReaderError(f"{MAX_BUFFERED} events of this answer wait, and the client does not read them")
    return FinishedEvent(request_id=request_id, reason="error", prompt_tokens=0, generated_tokens=0, error=error)


def _joined(events: Sequence[Event]) -> Iterator[PromptProgress | TokenEvent | FinishedEvent]:
    """Join positions of one prompt that follow each other to one item."""
    for request_id, same in itertools.groupby(events, key=_prompt_of):
        if request_id is None:
            yield from (event for event in same if not isinstance(event, PromptEvent))
        else:
            yield PromptProgress(request_id, tuple(event for event in same if isinstance(event, PromptEvent)))


def _prompt_of(event: Event) -> str | None:
    return event.request_id if isinstance(event, PromptEvent) else None


class RequestBroker:
    """Counts open prompts, passes requests to the engine and events to their handles."""

    def __init__(self, *, most_open: int, statistics: ServerStatistics) -> None:
        self.statistics = statistics
        self.observers: list[Observer] = []
        self.most_open = most_open
        """Limit of prompts that wait or are generated, those of the background not counted."""
        self.is_stopping: Callable[[], bool] = lambda: False
        """Returns True if the server was asked to stop, though a step may still be computed."""
        self._engine: Engine | None = None
        self._closed: GenerationError | None = None
        self._lock = threading.Lock()
        self._tickets: dict[str, RequestHandle] = {}
        self._logprobs = 0
        """Log-probabilities of all answers in work."""

    @property
    def problem(self) -> GenerationError | None:
        """Return why no request is accepted now, or None."""
        if self._closed is not None:
            return self._closed
        if self.is_stopping():
            return StoppingError("the server was asked to stop")
        return NotReadyError("the model is being loaded; try again in a moment") if self._engine is None else None

    def submit(self, requests: Sequence[GenerationRequest], *, logprobs: int = 0) -> RequestHandle:
        """Accept all of these prompts or none. `logprobs`: log-probabilities of the answer, until it is released.

        Raises:
            RequestError: a prompt cannot be served.
            QueueFullError: too many are open.
            GenerationError: no request is accepted now (`problem`).
        """
        ticket = RequestHandle(requests, self.cancel, logprobs)
        for request in requests:
            _ = request.digest  # of a large recipe it takes half a second, in which steps must not wait for the lock
        with self._lock:
            if (problem := self.problem) is not None:
                raise problem
            assert self._engine is not None
            self._check_capacity(ticket)
            self._tickets |= dict.fromkeys(ticket.ids, ticket)
            if not ticket.is_background:
                self.statistics.submitted(ticket.ids)
            self._submit_all(self._engine, requests)
            ticket.position = self._position(self._engine, ticket)
            self._logprobs += logprobs
        return ticket

    def release(self, ticket: RequestHandle) -> None:
        """Cancel the open prompts of a handle, whose answer is written or given up; call it once for each handle."""
        self.cancel(ticket)
        with self._lock:
            self._logprobs -= ticket.logprobs

    def cancel(self, ticket: RequestHandle) -> None:
        """Cancel the open prompts of a handle; its events are still delivered."""
        engine = self._engine
        if engine is not None:
            for request_id in ticket.ids:
                engine.cancel(request_id)

    def open(self, engine: "Engine") -> None:
        """Accept requests from now on: the model is loaded."""
        self._engine = engine

    def step(self, idle_s: float) -> None:
        """Let the engine do a step and deliver its events; without work wait for some for at most `idle_s` seconds."""
        engine = self._engine
        assert engine is not None
        engine.wait_for_work(idle_s)
        events = engine.step()
        self.statistics.count(events)
        for observer in self.observers:
            observer(events)
        self._announce_positions(engine)
        self._deliver(events)

    def close(self, reason: GenerationError) -> None:
        """Accept no more requests, and send the reason to all waiting clients."""
        with self._lock:
            self._closed = reason
            tickets, self._tickets = self._tickets, {}
        for request_id, ticket in tickets.items():
            ticket.put([FinishedEvent(
                request_id=request_id, reason="error", prompt_tokens=0, generated_tokens=0, error=reason
            )])  # fmt: skip

    def counts(self) -> tuple[int, int]:
        """Return the numbers of prompts that wait, and that are being generated."""
        engine = self._engine
        with self._lock:
            ids = list(self._tickets)
        waiting = 0 if engine is None else sum(engine.queue_position(request_id) is not None for request_id in ids)
        return waiting, len(ids) - waiting

    def _check_capacity(self, ticket: RequestHandle) -> None:
        alike = sum(handle.is_background == ticket.is_background for handle in self._tickets.values())
        most, what = (MOST_PROBED, "prompts of probes") if ticket.is_background else (self.most_open, "prompts")
        if alike + len(ticket.ids) > most:
            self.statistics.refused += not ticket.is_background
            raise QueueFullError(f"{alike} {what} are open, and at most {most} may be")
        if self._logprobs + ticket.logprobs > MOST_OPEN_LOGPROBS:
            self.statistics.refused += 1
            raise QueueFullError(
                f"unfinished answers have {self._logprobs} log-probabilities in memory, this one would add "
                f"{ticket.logprobs}, and the limit is {MOST_OPEN_LOGPROBS}"
            )

    def _submit_all(self, engine: "Engine", requests: Sequence[GenerationRequest]) -> None:
        try:
            engine.submit(*requests)
        except GenerationError:
            for request in requests:
                self._tickets.pop(request.id, None)
            self.statistics.refuse(request.id for request in requests)
            raise

    def _deliver(self, events: Sequence[Event]) -> None:
        """Deliver the events of each handle together."""
        batches: dict[RequestHandle, list[Item]] = {}
        with self._lock:
            for item in _joined(events):
                ticket = self._tickets.get(item.request_id)
                if ticket is not None:
                    batches.setdefault(ticket, []).append(item)
                if isinstance(item, FinishedEvent):
                    self._tickets.pop(item.request_id, None)
        for ticket, batch in batches.items():
            ticket.put(batch)

    def _announce_positions(self, engine: "Engine") -> None:
        with self._lock:
            waiting = {ticket for ticket in self._tickets.values() if ticket.position is not None}
        for ticket in waiting:
            position = self._position(engine, ticket)
            if position != ticket.position:
                ticket.position = position
                ticket.put([QueueEvent(position)])

    @staticmethod
    def _position(engine: "Engine", ticket: RequestHandle) -> int | None:
        places = (engine.queue_position(request_id) for request_id in ticket.ids)
        return min((place for place in places if place is not None), default=None)
