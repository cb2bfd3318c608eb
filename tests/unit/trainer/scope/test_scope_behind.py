"""Deferred work of steps is done in its order, at most one step late."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.device.idle_window import IdleWindow
from megatronapp_trainer.scope.transfer.deferred_work import DeferredWork

STEPS = st.lists(st.tuples(st.booleans(), st.booleans()))
"""Steps as two flags: it decodes, and it has an idle window."""


@given(STEPS)
def test_work_is_done_in_order_and_before_what_it_reads_changes(steps: list[tuple[bool, bool]]) -> None:
    lull, behind, done = IdleWindow(), DeferredWork(), list[int]()
    behind.set_scheduler(lull.defer)
    for number, (decodes, has_lull) in enumerate(steps):
        behind.before_step(decode=decodes)
        late = number - len(done)
        assert late == 0 or (late == 1 and decodes and not steps[number - 1][0])
        behind.submit(functools.partial(done.append, number), of_prompts=not decodes)
        assert number not in done
        if has_lull:
            with lull:
                pass
            assert (number in done) == decodes
        assert done == list(range(len(done)))
    behind.flush()
    assert done == list(range(len(steps)))


def test_what_prompts_left_waits_for_a_lull_of_the_next_step() -> None:
    lull, behind, done = IdleWindow(), DeferredWork(), list[str]()
    behind.set_scheduler(lull.defer)
    behind.before_step(decode=False)
    behind.submit(lambda: done.append("prompts"), of_prompts=True)
    for _ in range(3):  # ranks that answer for the others wait more than once in a step
        with lull:
            assert done == []
    behind.before_step(decode=True)
    with lull:
        assert done == ["prompts"]


def test_after_a_failure_nothing_more_is_launched() -> None:
    lull, behind, done = IdleWindow(), DeferredWork(), list[str]()
    behind.set_scheduler(lull.defer)
    behind.before_step(decode=True)
    behind.submit(_fail, of_prompts=False)
    behind.submit(lambda: done.append("more"), of_prompts=False)
    with pytest.raises(RuntimeError, match="no memory"), lull:
        pass
    behind.flush()
    with lull:
        pass
    assert done == []


def _fail() -> None:
    raise RuntimeError("no memory")


def test_nothing_is_put_off_where_there_are_no_lulls() -> None:
    behind, done = DeferredWork(), list[str]()
    behind.submit(lambda: done.append("now"), of_prompts=True)
    assert done == ["now"]
