"""Lets a rank collect garbage on a signal. Python imports this module at its start where its folder is on PYTHONPATH.

A signal of the process runs its handler in the thread that trains, between two of its instructions, as a collection
begins that Python itself starts. The first collection makes a heap that takes `LEAST_S` to collect.
"""

import gc
import os
import signal
import time
from types import FrameType

COLLECT, RELEASE = signal.SIGRTMIN + 8, signal.SIGRTMIN + 9
"""Signals to collect all objects, and to give the heap back."""
LEAST_S = 0.1
"""Time that a collection takes."""
FIRST_OBJECTS, MOST_OBJECTS = 1 << 17, 1 << 23
"""Bounds of the heap; an object has some 90 bytes."""
STRIDE = 48_271
"""Distance, in objects, between those that refer to each other, so that the collector finds few in the cache."""

heap: list[list[object]] = [[]]
is_collecting = False


def collect(_number: int = 0, _frame: FrameType | None = None) -> None:
    """Collect all objects, of which there are many. A signal that arrives meanwhile is ignored."""
    global is_collecting  # noqa: PLW0603 - a handler has no other place for it
    if is_collecting:
        return
    is_collecting = True
    try:
        if len(heap) > 1:
            gc.collect()
        else:
            build()
    finally:
        is_collecting = False


def build() -> None:
    """Fill the heap until a collection takes as long as it should."""
    count = FIRST_OBJECTS
    enlarge(count)
    while collection_s() < LEAST_S and count < MOST_OBJECTS:
        enlarge(count)
        count *= 2


def release(_number: int = 0, _frame: FrameType | None = None) -> None:
    """Give the heap back."""
    heap[1:] = []


def enlarge(count: int) -> None:
    """Add objects to the heap that take part in collections."""
    size = len(heap)
    heap.extend([heap[number * STRIDE % size]] for number in range(count))


def collection_s() -> float:
    """Return the time that a collection takes now."""
    begun = time.perf_counter()
    gc.collect()
    return time.perf_counter() - begun


def listen() -> None:
    """Collect on signals from now on."""
    for number, handler in ((COLLECT, collect), (RELEASE, release)):
        signal.signal(number, handler)
        signal.siginterrupt(number, False)  # training goes on, so no system call of a library may fail


if "LOCAL_RANK" in os.environ:
    listen()
