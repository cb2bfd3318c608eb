"""What was asked of the model once more, and what has come of it. Pure: the caller gives the time in seconds.

A probe is handed on whole or not at all: where a rank dropped a part, or more came than is kept, it has failed, and
whoever asks for the same next is told why, once.
"""

import dataclasses
import functools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.parts.merge import ShardTensor
from megatronapp_analyzer.scope.parts.part_tracker import PartHeader, PartTracker
from megatronapp_analyzer.web.problems import ApiError

LOG = logging.getLogger(__name__)
MAX_PROBES = 36
"""That are waited for; rank 0 takes a few more."""
MAX_OF_CALLER = 24
"""Of these, for one caller."""
MAX_BYTES = 256 << 20
"""That may come of all probes together before they are whole."""
MAX_EARLY_BYTES = 64 << 20
"""Of these, of probes that rank 0 has not answered for yet; of such probes as many as may be waited for are kept."""
PATIENCE_S = 120.0
"""A probe that is not whole by then is forgotten: its run may have been too long for the model that is there now."""
MAX_FAILURES = 64
RETRY_S = 1
Failure = Callable[[], ApiError]


def dropped() -> ApiError:
    """A rank had no room for a part."""
    text = "a rank had to drop a part of these numbers"
    return ApiError(503, "probe-incomplete", text, "Ask again in a moment.", retry_s=RETRY_S)


def too_large() -> ApiError:
    """More came than the hub keeps."""
    text = f"these numbers, and others that are on their way, are more than {MAX_BYTES >> 20} MiB"
    return ApiError(413, "too-large", text, "Take fewer rows: one position, or a tile further in.")


def no_memory(nbytes: int) -> ApiError:
    """All came, and is more than the ring has room for."""
    text = f"these numbers have {nbytes >> 20} MiB, for which the hub has no room"
    return ApiError(413, "too-large", text, "Take fewer rows: one position.")


def ranks_timed_out() -> ApiError:
    """The ranks did not bring it."""
    text = f"the model did not bring these numbers within {PATIENCE_S:.0f} s"
    return ApiError(503, "probe-incomplete", text, "Ask again in a moment.", retry_s=RETRY_S)


def invalid_answer() -> ApiError:
    """What came is not what was asked for."""
    text = "what the ranks brought does not fit together"
    return ApiError(503, "probe-incomplete", text, "Ask again in a moment; the hub's log says more.", retry_s=RETRY_S)


def engine_lost() -> ApiError:
    """The model that was asked is gone."""
    return ApiError(503, "engine-lost", "the model ended before it brought these numbers", "Ask again once it is back.")


def ranks_disconnected() -> ApiError:
    """Ranks went away that may have told it already, to nobody."""
    text = "ranks of the model went away before all of these numbers had come"
    return ApiError(503, "probe-incomplete", text, "Ask again in a moment.", retry_s=RETRY_S)


def _again(error: ApiError) -> ApiError:
    return error


@dataclasses.dataclass(slots=True)
class _TrackedProbe:
    began_s: float
    caller: str | None = None
    key: object = None
    done: Callable[[Sequence[ShardTensor]], None] | None = None
    """None: nobody has asked for it yet."""
    tensors: list[ShardTensor] = dataclasses.field(default_factory=list)
    parts: PartTracker = dataclasses.field(default_factory=PartTracker)
    bytes: int = 0
    failure: Failure | None = None


class ProbeTracker:
    """Probes by their id. `key` tells probes for the same apart from others, so that none is asked twice."""

    def __init__(self) -> None:
        self._probes: OrderedDict[str, _TrackedProbe] = OrderedDict()
        self._by_key: dict[object, str] = {}
        self._failures: OrderedDict[object, Failure] = OrderedDict()
        self._gone: deque[str] = deque(maxlen=MAX_FAILURES)
        """Probes of which nothing is kept any more, whatever still comes."""
        self.clears = 0
        """Who asks in the meantime has asked ranks that are not there any more."""

    def __len__(self) -> int:
        return sum(one.done is not None for one in self._probes.values())

    def find_pending(self, key: object) -> str | None:
        """The probe that was asked for this and has not come yet."""
        return self._by_key.get(key)

    def take_failure(self, key: object) -> ApiError | None:
        """Why the newest probe for this failed. Told once: who asks again has it tried again."""
        found = self._failures.pop(key, None)
        return None if found is None else found()

    def count(self, caller: str) -> int:
        """Probes that are under way for a caller."""
        return sum(one.caller == caller for one in self._probes.values())

    def expect(
        self, probe: str, key: object, done: Callable[[Sequence[ShardTensor]], None], now_s: float, *, caller: str = ""
    ) -> None:
        """Wait for a probe; what came before its answer did is taken, too. It fails at once if that is not kept."""
        known = self._probes.setdefault(probe, _TrackedProbe(now_s))
        if probe in self._gone:
            self._fail(known, dropped)
        known.key, known.done, known.caller = key, done, caller
        self._by_key[key] = probe

    def add(self, probe: str, pieces: Iterable[ShardTensor], now_s: float, part: PartHeader) -> None:
        """Pieces of one rank. Those of probes that nobody waits for are kept, too: their answer may be on its way."""
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
        if sum(one.bytes for one in self._probes.values()) > MAX_BYTES:
            self._fail(known, too_large)

    def _bound_early(self) -> None:
        """Of probes that nobody waits for the oldest go first. Who waits for one of them later is told at once."""
        early = [(name, one) for name, one in self._probes.items() if one.done is None]
        while len(early) > MAX_PROBES:
            self._forget(*early.pop(0))
        held_bytes = sum(one.bytes for _, one in early)
        for _, one in early:
            if held_bytes <= MAX_EARLY_BYTES:
                return
            held_bytes -= one.bytes
            self._fail(one, dropped)

    def settle(self, expected: Iterable[int], now_s: float) -> None:
        """Hand on what is complete: all of these ranks have reported. What has failed, or waits too long, goes."""
        ranks = set(expected)
        for probe, one in list(self._probes.items()):
            if now_s - one.began_s >= PATIENCE_S:
                self._fail(one, ranks_timed_out)
                self._forget(probe, one)
            elif one.done is None:
                continue
            elif one.failure is not None:
                self._forget(probe, one)
            elif ranks and min(ranks) >= 0 and one.parts.finished >= ranks:
                self._hand_on(one)
                self._forget(probe, one)

    def _hand_on(self, one: _TrackedProbe) -> None:
        assert one.done is not None
        try:
            one.done(one.tensors)
        except ProtocolError as error:
            LOG.warning("a probe is refused: %s", error)
            self._fail(one, invalid_answer)
        except ApiError as error:
            self._fail(one, functools.partial(_again, error))

    def clear(self, why: Failure = engine_lost) -> None:
        """The model that was asked is gone, or some of its ranks."""
        self.clears += 1
        for probe, one in list(self._probes.items()):
            self._fail(one, why)
            self._forget(probe, one)

    def _fail(self, one: _TrackedProbe, why: Failure) -> None:
        one.failure, one.tensors, one.bytes = one.failure or why, [], 0

    def _forget(self, probe: str, one: _TrackedProbe) -> None:
        del self._probes[probe]
        self._gone.append(probe)
        if one.done is None:
            return
        self._by_key.pop(one.key, None)
        if one.failure is not None:
            self._failures[one.key] = one.failure
            while len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)
