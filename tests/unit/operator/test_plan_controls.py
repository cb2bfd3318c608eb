"""Events of what users change through a hub, which the author of the job may have replaced."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_groups import worker_groups

from megatronapp_analyzer.scope.store.audit_log import AuditLog
from megatronapp_common.job import read_status, status_document
from megatronapp_operator.plan import ControlAction, JobSpec, JobState, Observed, RecordEvent, Status
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies.user_actions import (
    BUCKET_SIZE,
    GAP,
    HUB_MAX_CONTROLS,
    MAX_EVENTS,
    REFILL_S,
    controls,
    spent_after,
)
from megatronapp_operator.plan_io.hub_summary import read_controls

NOW = 1_763_000_000.0
NOW_MS = int(NOW) * 1000


class ControlHarness:
    """A job whose hub says this and that; every look reads the status as the last one wrote it down."""

    def __init__(self) -> None:
        self._job = JobState(
            spec=JobSpec(name="job", uid="u", worker_groups=worker_groups(2), hub=True), status=Status()
        )
        self.now = NOW
        self.spent = 0.0
        self.status = Status()
        self.wakes: list[float] = []

    def plan_with(self, *numbers: int) -> list[str]:
        actions = tuple(ControlAction(id=number, text=f"did {number}") for number in sorted(numbers))
        seen = Observed(controls=actions, controls_spent=self.spent)
        draft = PlanBuilder(job=self._job, observed=seen, now=self.now, status=self.status)
        controls(draft)
        self.spent = spent_after(self.spent, draft.actions, self.now)
        self.status, self.wakes = read_status(status_document(draft.status)), draft.wakes
        events = [action for action in draft.actions if isinstance(action, RecordEvent)]
        assert {event.reason for event in events} <= {"ScopeControl"}
        return [event.message for event in events]


@pytest.fixture
def harness() -> ControlHarness:
    return ControlHarness()


def test_no_action_of_the_future_hides_those_after_it(harness: ControlHarness) -> None:
    assert harness.plan_with((1 << 53) - 1, NOW_MS) == [f"did {NOW_MS}"]
    assert harness.plan_with(NOW_MS + 60_000, NOW_MS + 60_001) == [f"did {NOW_MS + 60_000}"], (
        "a clock may be a minute ahead"
    )
    harness.now += 1
    assert harness.plan_with(NOW_MS + 60_001) == [f"did {NOW_MS + 60_001}"]
    harness.status = dataclasses.replace(harness.status, last_control=(1 << 53) - 1)
    assert harness.plan_with(NOW_MS + 1) == [f"did {NOW_MS + 1}"], "as an older operator has left it"
    assert harness.status.last_control == NOW_MS + 1


def test_the_first_of_many_actions_are_reported_and_the_others_counted(harness: ControlHarness) -> None:
    texts = harness.plan_with(*range(64))
    assert texts[:-1] == [f"did {number}" for number in range(MAX_EVENTS - 1)]
    assert texts[-1].startswith("55 more changes")
    assert harness.plan_with(*range(64)) == []


def test_a_hub_that_makes_up_actions_makes_few_events(harness: ControlHarness) -> None:
    events, polls, seen = 0, 720, 0
    for poll in range(polls):
        texts = harness.plan_with(*range(poll * 64, poll * 64 + 64))
        events, seen = events + len(texts), seen + bool(texts)
        harness.now += 5
    assert seen > polls / 4, "what is new is told on and on"
    assert events <= BUCKET_SIZE + polls * 5 / REFILL_S
    harness.now += BUCKET_SIZE * REFILL_S
    assert harness.plan_with(NOW_MS) == [f"did {NOW_MS}"]


def test_an_action_without_a_token_waits_for_a_token(harness: ControlHarness) -> None:
    harness.status, harness.spent = Status(last_control=1), NOW + BUCKET_SIZE * REFILL_S
    assert harness.plan_with(1, 2) == []
    assert (harness.wakes, harness.status.last_control) == ([NOW + REFILL_S], 1)
    (harness.now,) = harness.wakes
    assert harness.plan_with(1, 2) == ["did 2"]
    harness.spent = harness.now + 1e6
    assert harness.plan_with(1, 2, 3) == ["did 3"], "a clock that was set back takes no turns"


def test_actions_that_a_hub_has_dropped_are_reported_missing(harness: ControlHarness) -> None:
    assert harness.plan_with(0) == ["did 0"]
    assert harness.plan_with(*range(HUB_MAX_CONTROLS))[0] == "did 1", "all that are new are still there"
    assert harness.plan_with(*range(HUB_MAX_CONTROLS, 2 * HUB_MAX_CONTROLS - 1))[0] == f"did {HUB_MAX_CONTROLS}"
    texts = harness.plan_with(*range(2 * HUB_MAX_CONTROLS + 5, 3 * HUB_MAX_CONTROLS + 5))
    assert texts[:2] == [GAP, f"did {2 * HUB_MAX_CONTROLS + 5}"] and len(texts) <= MAX_EVENTS
    assert harness.plan_with(*range(2 * HUB_MAX_CONTROLS + 5, 3 * HUB_MAX_CONTROLS + 5)) == []
    assert GAP not in ControlHarness().plan_with(*range(HUB_MAX_CONTROLS)), (
        "who sees a hub first does not know what was before"
    )


def test_actions_that_a_real_hub_has_forgotten_are_reported_missing(harness: ControlHarness) -> None:
    log = AuditLog(clock=lambda: NOW)

    def events() -> list[str]:
        entries = read_controls([dataclasses.asdict(entry) for entry in log.all()])
        return harness.plan_with(*(control.id for control in entries))

    log.note("jane", "started run 1")
    assert events() == [f"did {NOW_MS}"]
    for _ in range(250):
        log.note("jane", "cancelled run 1")
    assert GAP not in events()
    for _ in range(300):
        log.note("jane", "cancelled run 1")
    assert GAP in events()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sets(st.integers(0, 40), max_size=40), st.floats(0, 30)), max_size=6))
def test_each_action_is_reported_or_counted_once(rounds: list[tuple[set[int], float]]) -> None:
    harness, accounted = ControlHarness(), 0
    stored = set[int]()
    for numbers, pause in rounds:
        stored |= {number + max(stored, default=0) for number in numbers}
        for text in harness.plan_with(*stored):
            accounted += 1 if text.startswith("did") else int(text.split()[0])
        harness.now += pause
    harness.now += BUCKET_SIZE * REFILL_S
    for text in harness.plan_with(*stored):
        accounted += 1 if text.startswith("did") else int(text.split()[0])
    assert accounted == len(stored)
