"""Cache of answers that take long to compute."""

import asyncio
import concurrent.futures
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar, cast

import cachetools

from megatronapp_common.web.problems import HttpError

REST_FACTOR = 10
"""After an answer none is computed for this many times the processor time that it took."""
DEFERRED_S = 60.0
"""Rest that a question without an answer does not wait for; later ones do, so that the mean stays the same."""
MAX_WAITING = 8
"""Requests that wait for an answer while another one is computed."""
V = TypeVar("V")


class _Answer(NamedTuple):
    version: object
    value: object


class AnswerCache:
    """Newest answers by their question, computed by a separate thread, which rests after each of them.

    All questions together, without what `run` computes, take a tenth of a core in the mean. A page asks again with
    every step, and gets its last answer while the thread computes or rests; a question without an answer waits until
    little enough rest remains, so that a page that has just been opened gets its first answers at once. Requests with
    equal questions wait together: a client that gives up and asks again takes one place.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processor_clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        entries: int = 16,
    ) -> None:
        self._clock = clock
        self._processor_clock = processor_clock
        self._sleep = sleep
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._computing = asyncio.Lock()
        self._pending = 0
        self._waiting: dict[tuple[object, ...], asyncio.Task[_Answer]] = {}
        self._state = threading.Lock()  # of the two below, which the thread writes
        self._answers: cachetools.LRUCache[tuple[object, ...], _Answer] = cachetools.LRUCache(entries)
        self._rest_end = -math.inf

    def close(self) -> None:
        """End the thread after the answer that it computes, and all that wait."""
        for task in self._waiting.values():
            task.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def answer(self, question: tuple[object, ...], version: object, compute: Callable[[], V]) -> V:
        """Return what `compute` returns, or an older answer to the question: one of the same version, or any one while
        the thread computes or rests.

        Raises HttpError 503 if MAX_WAITING requests wait already.
        """
        if (known := self._known(question, version)) is not None:
            return cast(V, known.value)
        task = self._waiting.get(question)
        if task is None:
            self._take_place()
            task = asyncio.create_task(self._wait(question, version, compute))
            self._waiting[question] = task
            task.add_done_callback(lambda done: self._forget(question, done))
        return cast(V, (await asyncio.shield(task)).value)

    def _forget(self, question: tuple[object, ...], task: "asyncio.Task[_Answer]") -> None:
        del self._waiting[question]
        self._pending -= 1
        if not task.cancelled():
            task.exception()  # retrieved also where every request that waited has been cancelled

    async def _wait(self, question: tuple[object, ...], version: object, compute: Callable[[], object]) -> _Answer:
        """Wait until the thread is free and rested, and compute the answer unless another request has done so."""
        async with self._computing:
            while (rest_s := self._rest_s() - DEFERRED_S) > 0:
                await self._sleep(rest_s)
            found = self._of_version(question, version)
            if found is None:
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._executor, self._compute, question, version, compute)
            return found

    async def run(self, compute: Callable[[], V]) -> V:
        """Return what `compute` returns, which is quick: computed by the same thread, without a rest before or after.

        Raises HttpError 503 if MAX_WAITING requests wait already.
        """
        self._take_place()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, compute)
        finally:
            self._pending -= 1

    def _take_place(self) -> None:
        """Count a question that waits or is computed. Raises HttpError 503 as above."""
        if self._pending > MAX_WAITING:
            retry_s = math.ceil(max(1.0, self._rest_s() - DEFERRED_S))  # its end is long ago where nothing was computed
            text = f"{MAX_WAITING} requests for the analysis of slow ranks wait already"
            raise HttpError(503, "busy", text, f"Try again in {retry_s} s.", retry_s=retry_s)
        self._pending += 1

    def _known(self, question: tuple[object, ...], version: object) -> _Answer | None:
        """Return an answer that can be given at once."""
        with self._state:
            known = self._answers.get(question)
            if known is None:
                return None
            if known.version != version and not self._pending and self._clock() >= self._rest_end:
                return None
            return known

    def _of_version(self, question: tuple[object, ...], version: object) -> _Answer | None:
        with self._state:
            known = self._answers.get(question)
            return known if known is not None and known.version == version else None

    def _rest_s(self) -> float:
        with self._state:
            return self._rest_end - self._clock()

    def _compute(self, question: tuple[object, ...], version: object, compute: Callable[[], object]) -> _Answer:
        """Compute an answer, in the thread; one that fails is followed by a rest, too."""
        begun = self._processor_clock()
        try:
            found = _Answer(version, compute())
        finally:
            spent = self._processor_clock() - begun
            with self._state:
                self._rest_end = max(self._rest_end, self._clock()) + REST_FACTOR * spent
        with self._state:
            self._answers[question] = found
        return found
