"""Queue of keys: many requests are one reconciliation, no key is taken twice at a time, and none is forgotten."""

import asyncio

import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_operator.backends.kubernetes.keyed_queue import KeyedQueue

KEYS = "abc"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(KEYS)),
        st.tuples(st.just("at"), st.sampled_from(KEYS), st.integers(0, 20)),
        st.tuples(st.just("pass"), st.integers(1, 5)),
        st.tuples(st.just("take")),
        st.tuples(st.just("done"), st.sampled_from(KEYS)),
    ),
    max_size=60,
)


async def taken(queue: KeyedQueue[str]) -> str | None:
    """The next key, if there is one now."""
    task = asyncio.ensure_future(queue.take())
    for _ in range(3):
        await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def play(steps: list[tuple[object, ...]]) -> None:
    """Compare the queue with a model of it: sets of keys that wait, are busy, and have a time."""
    clock = FakeClock()
    queue: KeyedQueue[str] = KeyedQueue(clock)
    waiting: list[str] = []
    busy: set[str] = set()
    due: dict[str, float] = {}
    for step in steps:
        match step:
            case ("add", str(key)):
                queue.add(key)
                waiting += [] if key in waiting else [key]
            case ("at", str(key), int(pause)):
                queue.add_at(key, clock.now + pause)
                due[key] = min(due.get(key, float("inf")), clock.now + pause)
            case ("pass", int(seconds)):
                clock.now += seconds
            case ("done", str(key)):
                queue.done(key)
                busy.discard(key)
            case ("take",):
                ripe = sorted((at, key) for key, at in due.items() if at <= clock.now)
                expected = [*waiting, *(key for _, key in ripe if key not in waiting)]
                found = await taken(queue)
                for _, key in ripe:
                    del due[key]
                waiting = expected
                free = [key for key in expected if key not in busy]
                assert (found in free) if free else found is None
                if found is not None:
                    waiting.remove(found)
                    due.pop(found, None)
                    busy.add(found)


@given(STEPS)
def test_the_queue_is_as_its_model(steps: list[tuple[object, ...]]) -> None:
    asyncio.run(play(steps))


@pytest.mark.asyncio
async def test_who_waits_is_woken_by_a_new_key_and_by_an_earlier_time() -> None:
    loop = asyncio.get_running_loop()
    queue: KeyedQueue[str] = KeyedQueue(loop.time)
    queue.add_at("late", loop.time() + 3600)
    first, second = asyncio.ensure_future(queue.take()), asyncio.ensure_future(queue.take())
    await asyncio.sleep(0)
    queue.add("now")
    assert await first == "now"
    queue.add_at("late", loop.time() + 0.01)
    assert await second == "late"


@pytest.mark.asyncio
async def test_a_key_added_while_it_is_processed_is_returned_again() -> None:
    queue: KeyedQueue[str] = KeyedQueue(FakeClock())
    queue.add("a")
    assert await queue.take() == "a"
    queue.add("a")
    assert await taken(queue) is None
    queue.done("a")
    assert await queue.take() == "a"
    assert (queue.depth, queue.oldest_s) == (0, 0.0)
