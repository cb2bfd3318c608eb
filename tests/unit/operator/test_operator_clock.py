"""The clock that deadlines go by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_operator.controller.clock import AGREED, AGREED_S, SLACK_S, SLEW, ServerClock


class FakeHost:
    """Machine whose wall clock is off by a number of seconds."""

    def __init__(self, off_s: float) -> None:
        self.now, self.off_s = 5_000_000.0, off_s
        self.clock = ServerClock(wall=lambda: self.now + off_s, monotonic=lambda: self.now - 4_000_000.0)

    def request_time(self, took_s: float = 0.2, wrong_s: float = 0.0) -> None:
        """Ask an API server whose clock is wrong by this number of seconds; it answers in whole seconds."""
        sent = self.now - 4_000_000.0
        date = float(int(self.now + took_s / 2 + wrong_s))
        self.now += took_s
        self.clock.observe_date(date, sent, sent + took_s)

    def request_time_repeatedly(self, wrong_s: float = 0.0) -> None:
        """Ask again and again, until the answers count."""
        for _ in range(AGREED):
            self.request_time(wrong_s=wrong_s)
            self.now += AGREED_S / (AGREED - 1)


@pytest.mark.parametrize("off_s", [3600.0, -3600.0, 30.0, -30.0])
def test_a_host_that_boots_with_a_wrong_clock_follows_the_api_server(off_s: float) -> None:
    host = FakeHost(off_s)
    host.request_time()
    assert host.clock() == pytest.approx(host.now, abs=1.5)


@pytest.mark.parametrize("off_s", [0.0, 1.0, -1.0])
def test_what_the_resolution_of_a_date_may_be_is_no_difference(off_s: float) -> None:
    host = FakeHost(off_s)
    host.request_time()
    assert host.clock() == host.now + off_s


@pytest.mark.parametrize("wrong_s", [3600.0, -3600.0])
def test_a_right_answer_corrects_a_wrong_answer_before_the_first_reading(wrong_s: float) -> None:
    host = FakeHost(0.0)
    host.request_time(wrong_s=wrong_s)
    host.request_time()
    assert host.clock() == pytest.approx(host.now, abs=1.5)


@pytest.mark.parametrize("wrong_s", [3600.0, -3600.0, 30.0, -30.0])
def test_answers_of_a_single_wrong_server_are_ignored(wrong_s: float) -> None:
    host = FakeHost(0.0)
    host.request_time()
    host.clock()
    for _ in range(20):
        for _ in range(AGREED - 1):
            host.request_time(wrong_s=wrong_s)
            host.now += AGREED_S
            assert host.clock() == pytest.approx(host.now, abs=0.01)
        host.request_time()


def test_many_wrong_answers_within_a_short_time_are_ignored() -> None:
    host = FakeHost(0.0)
    host.clock()
    for _ in range(100):
        host.request_time(took_s=0.01, wrong_s=3600.0)
    host.request_time()
    host.now += AGREED_S
    host.request_time(wrong_s=3600.0)
    assert host.clock() == pytest.approx(host.now, abs=0.01)


def test_wrong_answers_that_contradict_each_other_are_ignored() -> None:
    host = FakeHost(0.0)
    host.clock()
    for number in range(20):
        host.request_time(wrong_s=100.0 * (number + 1))
        host.now += AGREED_S
    assert host.clock() == pytest.approx(host.now, abs=0.01)


@pytest.mark.parametrize("off_s", [60.0, -60.0])
def test_a_clock_in_use_approaches_the_server_without_jumping_or_stopping(off_s: float) -> None:
    host = FakeHost(off_s)
    host.clock()
    host.request_time_repeatedly()
    for _ in range(int(60.0 / SLEW)):
        before = host.clock()
        host.now += 1.0
        assert 1.0 - SLEW - 1e-6 <= host.clock() - before <= 1.0 + SLEW + 1e-6
    assert host.clock() == pytest.approx(host.now, abs=1.5)


def test_a_correction_counts_from_its_decision_not_from_the_last_reading() -> None:
    host = FakeHost(-60.0)
    host.clock()
    host.now += 3600.0
    host.request_time_repeatedly()
    assert host.clock() == pytest.approx(host.now - 60.0 + SLEW * AGREED_S / (AGREED - 1), abs=0.5)


@given(st.floats(-1e5, 1e5), st.lists(st.tuples(st.floats(0, 20), st.floats(0, 30)), max_size=8))
def test_answers_keep_the_clock_within_the_length_of_a_request(
    off_s: float, requests: list[tuple[float, float]]
) -> None:
    host, last = FakeHost(off_s), float("-inf")
    for pause_s, took_s in requests:
        host.now += pause_s
        host.request_time(took_s)
        reading = host.clock()
        assert reading >= last
        last = reading
    if requests:
        slowest = max(took for _, took in requests)
        assert host.clock() >= host.now - slowest - SLACK_S - 1
