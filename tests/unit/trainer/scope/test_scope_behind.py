"""What steps leave behind is done in its order, at most one step late."""

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_trainer.generate.lull import Lull
from megatronapp_trainer.scope.behind import Behind

STEPS = st.lists(st.tuples(st.booleans(), st.booleans()))
"""Whether a step decodes, and whether there is a lull in it."""


@given(STEPS)
def test_work_is_done_in_order_and_before_what_it_reads_changes(steps: list[tuple[bool, bool]]) -> None:
    lull, behind, done = Lull(), Behind(), list[int]()
    behind.put_off_by(lull.defer)
    for number, (decodes, has_lull) in enumerate(steps):
        behind.before_step(decode=decodes)
        late = number - len(done)
        assert late == 0 or (late == 1 and decodes and not steps[number - 1][0])
        behind.leave(lambda number=number: done.append(number), of_prompts=not decodes)
        assert number not in done
        if has_lull:
            with lull:
                pass
            assert (number in done) == decodes
        assert done == list(range(len(done)))
    behind.catch_up()
    assert done == list(range(len(steps)))


def test_prompts_are_done_in_the_second_lull() -> None:
    lull, behind, done = Lull(), Behind(), list[str]()
    behind.put_off_by(lull.defer)
    behind.leave(lambda: done.append("prompts"), of_prompts=True)
    with lull:
        assert done == []
    with lull:
        assert done == ["prompts"]


def test_nothing_is_put_off_where_there_are_no_lulls() -> None:
    behind, done = Behind(), list[str]()
    behind.leave(lambda: done.append("now"), of_prompts=True)
    assert done == ["now"]
