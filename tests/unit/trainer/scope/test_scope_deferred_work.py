"""Deferred work of steps is done in its order, at most one step late."""

import functools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.scope.transfer.deferred_work import DeferredWork

STEPS = st.lists(st.tuples(st.booleans(), st.booleans()))
"""Steps as two flags: it decodes, and it has an idle window."""


@given(STEPS)
def test_work_is_done_in_order_and_before_what_it_reads_changes(steps: list[tuple[bool, bool]]) -> None:
    idle_window, deferred, done = IdleWindow(), DeferredWork(), list[int]()
    deferred.set_scheduler(idle_window.defer)
    for number, (decodes, has_window) in enumerate(steps):
        deferred.before_step(decode=decodes)
        late = number - len(done)
        assert late == 0 or (late == 1 and decodes and not steps[number - 1][0])
        deferred.submit(functools.partial(done.append, number), of_prompts=not decodes)
        assert number not in done
        if has_window:
            with idle_window:
                pass
            assert (number in done) == decodes
        assert done == list(range(len(done)))
    deferred.flush()
    assert done == list(range(len(steps)))


def test_work_of_prompts_waits_for_an_idle_window_of_the_next_step() -> None:
    idle_window, deferred, done = IdleWindow(), DeferredWork(), list[str]()
    deferred.set_scheduler(idle_window.defer)
    deferred.before_step(decode=False)
    deferred.submit(lambda: done.append("prompts"), of_prompts=True)
    for _ in range(3):  # ranks that answer for the others wait more than once in a step
        with idle_window:
            assert done == []
    deferred.before_step(decode=True)
    with idle_window:
        assert done == ["prompts"]


def test_work_of_steps_ahead_waits_for_the_window_of_the_next_step() -> None:
    deferred, done, windows = DeferredWork(), list[int](), list[Callable[[], None]]()
    deferred.set_scheduler(windows.append)
    for number in range(4):
        deferred.before_step(decode=True)
        deferred.submit(functools.partial(done.append, number), of_prompts=False, is_ahead=True)
        (due,) = windows  # however many steps there were
        windows.clear()
        due()
        assert done == list(range(number))


def test_after_a_failure_nothing_more_is_launched() -> None:
    idle_window, deferred, done = IdleWindow(), DeferredWork(), list[str]()
    deferred.set_scheduler(idle_window.defer)
    deferred.before_step(decode=True)
    deferred.submit(_fail, of_prompts=False)
    deferred.submit(lambda: done.append("more"), of_prompts=False)
    with pytest.raises(RuntimeError, match="no memory"), idle_window:
        pass
    deferred.flush()
    with idle_window:
        pass
    assert done == []


def _fail() -> None:
    raise RuntimeError("no memory")


def test_nothing_is_put_off_where_there_are_no_lulls() -> None:
    deferred, done = DeferredWork(), list[str]()
    deferred.submit(lambda: done.append("now"), of_prompts=True)
    assert done == ["now"]
