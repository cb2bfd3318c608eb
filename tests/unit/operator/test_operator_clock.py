"""The clock that deadlines go by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_operator.controller.clock import SLACK_S, Clock


class Machine:
    """A machine whose wall clock is off by so many seconds."""

    def __init__(self, off_s: float) -> None:
        self.now, self.off_s = 5_000_000.0, off_s
        self.clock = Clock(wall=lambda: self.now + off_s, monotonic=lambda: self.now - 4_000_000.0)

    def ask(self, took_s: float = 0.2) -> None:
        """Ask an API server whose clock is right; it says whole seconds."""
        sent = self.now - 4_000_000.0
        date = float(int(self.now + took_s / 2))
        self.now += took_s
        self.clock.heard(date, sent, sent + took_s)


@pytest.mark.parametrize("off_s", [3600.0, -3600.0, 30.0, -30.0])
def test_a_machine_that_boots_with_a_wrong_clock_follows_the_api_server(off_s: float) -> None:
    machine = Machine(off_s)
    machine.ask()
    assert machine.clock() == pytest.approx(machine.now, abs=1.5)


@pytest.mark.parametrize("off_s", [0.0, 1.0, -1.0])
def test_what_the_resolution_of_a_date_may_be_is_no_difference(off_s: float) -> None:
    machine = Machine(off_s)
    machine.ask()
    assert machine.clock() == machine.now + off_s


def test_a_clock_that_was_ahead_stands_still_and_never_goes_back() -> None:
    machine = Machine(60.0)
    first = machine.clock()
    machine.ask()
    assert machine.clock() == first
    machine.now += 30
    assert machine.clock() == first
    machine.now += 60
    assert machine.clock() == pytest.approx(machine.now, abs=1.5)


@given(st.floats(-1e5, 1e5), st.lists(st.tuples(st.floats(0, 20), st.floats(0, 30)), max_size=8))
def test_answers_keep_the_clock_within_the_length_of_a_request(off_s: float, asked: list[tuple[float, float]]) -> None:
    machine, last = Machine(off_s), float("-inf")
    for pause_s, took_s in asked:
        machine.now += pause_s
        machine.ask(took_s)
        reading = machine.clock()
        assert reading >= last
        last = reading
    if asked:
        slowest = max(took for _, took in asked)
        assert machine.clock() >= machine.now - slowest - SLACK_S - 1
