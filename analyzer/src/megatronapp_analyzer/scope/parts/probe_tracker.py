"""Probes that were requested, and what has arrived of them. Pure: the caller gives the time in seconds.

A probe is handed on whole or not: if a rank dropped a part, or more arrived than may be stored, it has failed, and the
next request for the same probe gets the reason, once.
"""

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import cachetools

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.parts.merge import ShardTensor
from megatronapp_analyzer.scope.parts.part_tracker import PartHeader, PartTracker
from megatronapp_common.web.problems import HttpError

LOG = logging.getLogger(__name__)
MAX_PROBES = 36
"""Probes that may be pending; rank 0 takes a few more."""
MAX_OF_CALLER = 24
"""Pending probes of one caller."""
MAX_BYTES = 256 << 20
"""Bytes that all incomplete probes may have together."""
MAX_EARLY_BYTES = 64 << 20
"""Bytes of these for probes that rank 0 has not answered yet; at most MAX_PROBES such probes are stored."""
PATIENCE_S = 120.0
"""Seconds until an incomplete probe fails: its run may have been too long for the present model."""
MAX_FAILURES = 64
RETRY_S = 1
Failure = Callable[[], HttpError]


def dropped() -> HttpError:
    """Return the error for a part that a rank had to drop."""
    text = "a rank had to drop a part of these numbers"
    return HttpError(503, "probe-incomplete", text, "Try again in a moment.", retry_s=RETRY_S)


def too_large() -> HttpError:
    """Return the error for probes of more bytes than the hub stores."""
    text = f"these numbers, and others that are on their way, are more than {MAX_BYTES >> 20} MiB"
    return HttpError(413, "too-large", text, "Take fewer rows: one position, or a tile further in.")


def no_memory(nbytes: int) -> HttpError:
    """Return the error for a complete probe without room in the memory budget."""
    text = f"these numbers have {nbytes >> 20} MiB, for which the hub has no room"
    return HttpError(413, "too-large", text, "Take fewer rows: one position.")


def ranks_timed_out() -> HttpError:
    """Return the error for a probe that was not complete in time."""
    text = f"the model did not bring these numbers within {PATIENCE_S:.0f} s"
    return HttpError(503, "probe-incomplete", text, "Try again in a moment.", retry_s=RETRY_S)


def invalid_answer() -> HttpError:
    """Return the error for an answer that does not match the request."""
    text = "what the ranks brought does not fit together"
    return HttpError(503, "probe-incomplete", text, "Ask again in a moment; the hub's log says more.", retry_s=RETRY_S)


def engine_lost() -> HttpError:
    """Return the error for a probe whose model was lost."""
    return HttpError(
        503, "engine-lost", "the model ended before it sent these numbers", "Try again when it is running again."
    )


def ranks_disconnected() -> HttpError:
    """Return the error for a probe of ranks that disconnected: they may have sent parts that were lost."""
    text = "ranks of the model disconnected before they had sent all of these numbers"
    return HttpError(503, "probe-incomplete", text, "Try again in a moment.", retry_s=RETRY_S)


def _again(error: HttpError) -> HttpError:
    return error


@dataclasses.dataclass(slots=True)
class _TrackedProbe:
    began_s: float
    caller: str | None = None
    key: object = None
    done: Callable[[Sequence[ShardTensor]], None] | None = None
    """None: not requested yet."""
    tensors: list[ShardTensor] = dataclasses.field(default_factory=list)
    parts: PartTracker = dataclasses.field(default_factory=PartTracker)
    bytes: int = 0
    failure: Failure | None = None


class ProbeTracker:
    """Probes by id. `key` identifies what a probe is for, so that nothing is requested twice."""

    def __init__(self) -> None:
        self._probes: dict[str, _TrackedProbe] = {}
        self._by_key: dict[object, str] = {}
        self._failures: cachetools.LRUCache[object, Failure] = cachetools.LRUCache(MAX_FAILURES)
        self._gone: deque[str] = deque(maxlen=MAX_FAILURES)
        """Ids of probes that are finished; parts that still arrive are ignored."""
        self.clears = 0
        """Number of calls of `clear`; if it grows during a request, the ranks that got the request were lost."""

    def __len__(self) -> int:
        return sum(tracked.done is not None for tracked in self._probes.values())

    def find_pending(self, key: object) -> str | None:
        """Return the pending probe for this, if any."""
        return self._by_key.get(key)

    def take_failure(self, key: object) -> HttpError | None:
        """Return why the newest probe for this failed, once: the next request is sent again."""
        found = self._failures.pop(key, None)
        return None if found is None else found()

    def count(self, caller: str) -> int:
        """Return the number of pending probes of a caller."""
        return sum(tracked.caller == caller for tracked in self._probes.values())

    def expect(
        self, probe: str, key: object, done: Callable[[Sequence[ShardTensor]], None], now_s: float, *, caller: str = ""
    ) -> None:
        """Expect a probe; parts that arrived before its answer are used. It fails at once if they were dropped."""
        known = self._probes.setdefault(probe, _TrackedProbe(now_s))
        if probe in self._gone:
            self._fail(known, dropped)
        known.key, known.done, known.caller = key, done, caller
        self._by_key[key] = probe

    def add(self, probe: str, pieces: Iterable[ShardTensor], now_s: float, part: PartHeader) -> None:
        """Add tensors of one rank, also for a probe that is not expected yet: its answer may be on the way."""
        if probe in self._gone:
            return
        self._take(self._probes.setdefault(probe, _TrackedProbe(now_s)), pieces, part)
        self._bound_early()

    def _take(self, known: _TrackedProbe, pieces: Iterable[ShardTensor], part: PartHeader) -> None:
        known.parts.add(part)
        if part.dropped:
            self._fail(known, dropped)
        if known.failure is not None:
            return
        for piece in pieces:
            known.bytes += piece.tensor.nbytes
            known.tensors.append(piece)
        if sum(tracked.bytes for tracked in self._probes.values()) > MAX_BYTES:
            self._fail(known, too_large)

    def _bound_early(self) -> None:
        """Drop the oldest probes that are not expected; a later `expect` of one of them fails at once."""
        early = [(name, tracked) for name, tracked in self._probes.items() if tracked.done is None]
        while len(early) > MAX_PROBES:
            self._forget(*early.pop(0))
        held_bytes = sum(tracked.bytes for _, tracked in early)
        for _, tracked in early:
            if held_bytes <= MAX_EARLY_BYTES:
                return
            held_bytes -= tracked.bytes
            self._fail(tracked, dropped)

    def settle(self, expected: Iterable[int], now_s: float) -> None:
        """Hand on probes that all of these ranks have reported; remove those that failed or took too long."""
        ranks = set(expected)
        for probe, tracked in list(self._probes.items()):
            if now_s - tracked.began_s >= PATIENCE_S:
                self._fail(tracked, ranks_timed_out)
                self._forget(probe, tracked)
            elif tracked.done is None:
                continue
            elif tracked.failure is not None:
                self._forget(probe, tracked)
            elif ranks and min(ranks) >= 0 and tracked.parts.finished >= ranks:
                self._hand_on(tracked)
                self._forget(probe, tracked)

    def _hand_on(self, tracked: _TrackedProbe) -> None:
        assert tracked.done is not None
        try:
            tracked.done(tracked.tensors)
        except ProtocolError as error:
            LOG.warning("a probe is refused: %s", error)
            self._fail(tracked, invalid_answer)
        except HttpError as error:
            self._fail(tracked, functools.partial(_again, error))

    def clear(self, why: Failure = engine_lost) -> None:
        """Fail all probes: the model was lost, or some of its ranks."""
        self.clears += 1
        for probe, tracked in list(self._probes.items()):
            self._fail(tracked, why)
            self._forget(probe, tracked)

    def _fail(self, tracked: _TrackedProbe, why: Failure) -> None:
        tracked.failure, tracked.tensors, tracked.bytes = tracked.failure or why, [], 0

    def _forget(self, probe: str, tracked: _TrackedProbe) -> None:
        del self._probes[probe]
        self._gone.append(probe)
        if tracked.done is None:
            return
        self._by_key.pop(tracked.key, None)
        if tracked.failure is not None:
            self._failures[tracked.key] = tracked.failure
