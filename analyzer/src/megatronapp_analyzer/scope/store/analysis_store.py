"""Results of analyses of one run, as frames SCOPE_ANALYSIS, as long as the memory budget has room for them. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget, RetentionClass
from megatronapp_common import frames
from megatronapp_common.frames import Frame


class AnalysisStore:
    """Frames by sample and request. A newer frame of the same request replaces an older one."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._frames: dict[tuple[int, str], tuple[int, bytes]] = {}
        self._tickets: list[int] = []

    def put(self, frame: Frame) -> None:
        """Store a frame whose header has `sample`, `request` and `count`. Raises KeyError, TypeError."""
        header = frame.header
        key = int(header["sample"]), key_of(header["request"])
        entry = int(header["count"]), frames.encode(frame)
        self._frames[key] = entry
        self._tickets.append(self._budget.hold(RetentionClass.VALUES, len(entry[1]), lambda: self._drop(key, entry)))

    def get(self, sample: int, request: Mapping[str, Any], count: int) -> Frame | None:
        """Return the result of a request over at least `count` tokens of a sample; None if it is not stored."""
        known = self._frames.get((sample, key_of(request)))
        return None if known is None or known[0] < count else frames.decode(known[1])

    def stored(self) -> list[bytes]:
        """Return the frames of all results, in order of their requests."""
        return [data for _, data in self._frames.values()]

    def close(self) -> None:
        """Release the memory of all frames and forget them."""
        for ticket in self._tickets:
            self._budget.release(ticket)
        self._frames.clear()

    def _drop(self, key: tuple[int, str], entry: tuple[int, bytes]) -> None:
        if self._frames.get(key) is entry:
            del self._frames[key]


def key_of(request: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal requests."""
    return json.dumps(request, sort_keys=True)
