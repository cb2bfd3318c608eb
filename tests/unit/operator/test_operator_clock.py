"""The clock that deadlines go by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_operator.controller.clock import AGREED, AGREED_S, SLACK_S, SLEW, ServerClock


class Machine:
    """Machine whose wall clock is off by a number of seconds."""

    def __init__(self, off_s: float) -> None:
        self.now, self.off_s = 5_000_000.0, off_s
        self.clock = ServerClock(wall=lambda: self.now + off_s, monotonic=lambda: self.now - 4_000_000.0)

    def ask(self, took_s: float = 0.2, wrong_s: float = 0.0) -> None:
        """Ask an API server whose clock is wrong by this number of seconds; it answers in whole seconds."""
        sent = self.now - 4_000_000.0
        date = float(int(self.now + took_s / 2 + wrong_s))
        self.now += took_s
        self.clock.observe_date(date, sent, sent + took_s)

    def ask_for_long(self, wrong_s: float = 0.0) -> None:
        """Ask again and again, until the answers count."""
        for _ in range(AGREED):
            self.ask(wrong_s=wrong_s)
            self.now += AGREED_S / (AGREED - 1)


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


@pytest.mark.parametrize("wrong_s", [3600.0, -3600.0])
def test_before_the_first_reading_a_right_answer_undoes_a_wrong_one(wrong_s: float) -> None:
    machine = Machine(0.0)
    machine.ask(wrong_s=wrong_s)
    machine.ask()
    assert machine.clock() == pytest.approx(machine.now, abs=1.5)


@pytest.mark.parametrize("wrong_s", [3600.0, -3600.0, 30.0, -30.0])
def test_answers_of_one_wrong_server_among_right_ones_are_ignored(wrong_s: float) -> None:
    machine = Machine(0.0)
    machine.ask()
    machine.clock()
    for _ in range(20):
        for _ in range(AGREED - 1):
            machine.ask(wrong_s=wrong_s)
            machine.now += AGREED_S
            assert machine.clock() == pytest.approx(machine.now, abs=0.01)
        machine.ask()


def test_many_wrong_answers_within_a_short_time_are_ignored() -> None:
    machine = Machine(0.0)
    machine.clock()
    for _ in range(100):
        machine.ask(took_s=0.01, wrong_s=3600.0)
    machine.ask()
    machine.now += AGREED_S
    machine.ask(wrong_s=3600.0)
    assert machine.clock() == pytest.approx(machine.now, abs=0.01)


def test_wrong_answers_that_contradict_each_other_are_ignored() -> None:
    machine = Machine(0.0)
    machine.clock()
    for number in range(20):
        machine.ask(wrong_s=100.0 * (number + 1))
        machine.now += AGREED_S
    assert machine.clock() == pytest.approx(machine.now, abs=0.01)


@pytest.mark.parametrize("off_s", [60.0, -60.0])
def test_a_clock_in_use_approaches_the_server_and_neither_leaps_nor_stands_still(off_s: float) -> None:
    machine = Machine(off_s)
    machine.clock()
    machine.ask_for_long()
    for _ in range(int(60.0 / SLEW)):
        before = machine.clock()
        machine.now += 1.0
        assert 1.0 - SLEW - 1e-6 <= machine.clock() - before <= 1.0 + SLEW + 1e-6
    assert machine.clock() == pytest.approx(machine.now, abs=1.5)


def test_a_correction_counts_from_its_decision_not_from_the_last_reading() -> None:
    machine = Machine(-60.0)
    machine.clock()
    machine.now += 3600.0
    machine.ask_for_long()
    assert machine.clock() == pytest.approx(machine.now - 60.0 + SLEW * AGREED_S / (AGREED - 1), abs=0.5)


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
