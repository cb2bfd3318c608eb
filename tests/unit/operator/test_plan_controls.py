"""Events of what users change through a hub, which the author of the job may have replaced."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_groups import worker_groups

from megatronapp_analyzer.scope.store.audit_log import AuditLog
from megatronapp_operator.plan import ControlAction, JobSpec, JobState, Observed, RecordEvent, Status
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies.controls import (
    BUCKET_SIZE,
    GAP,
    HUB_MAX_CONTROLS,
    MAX_EVENTS,
    REFILL_S,
    controls,
    spent_after,
)
from megatronapp_operator.plan_io.hub_summary import read_controls
from megatronapp_operator.plan_io.status_document import status_document
from megatronapp_operator.plan_io.status_reader import read_status

NOW = 1_763_000_000.0
NOW_MS = int(NOW) * 1000


class Told:
    """A job whose hub says this and that; every look reads the status as the last one wrote it down."""

    def __init__(self) -> None:
        self._job = JobState(
            spec=JobSpec(name="job", uid="u", worker_groups=worker_groups(2), hub=True), status=Status()
        )
        self.now = NOW
        self.spent = 0.0
        self.status = Status()
        self.wakes: list[float] = []

    def look(self, *numbers: int) -> list[str]:
        said = tuple(ControlAction(id=number, text=f"did {number}") for number in sorted(numbers))
        seen = Observed(controls=said, controls_spent=self.spent)
        draft = PlanBuilder(job=self._job, observed=seen, now=self.now, status=self.status)
        controls(draft)
        self.spent = spent_after(self.spent, draft.actions, self.now)
        self.status, self.wakes = read_status(status_document(draft.status)), draft.wakes
        events = [one for one in draft.actions if isinstance(one, RecordEvent)]
        assert {one.reason for one in events} <= {"ScopeControl"}
        return [one.message for one in events]


@pytest.fixture
def told() -> Told:
    return Told()


def test_no_action_of_the_future_hides_those_after_it(told: Told) -> None:
    assert told.look((1 << 53) - 1, NOW_MS) == [f"did {NOW_MS}"]
    assert told.look(NOW_MS + 60_000, NOW_MS + 60_001) == [f"did {NOW_MS + 60_000}"], "a clock may be a minute ahead"
    told.now += 1
    assert told.look(NOW_MS + 60_001) == [f"did {NOW_MS + 60_001}"]
    told.status = dataclasses.replace(told.status, last_control=(1 << 53) - 1)
    assert told.look(NOW_MS + 1) == [f"did {NOW_MS + 1}"], "as an older operator has left it"
    assert told.status.last_control == NOW_MS + 1


def test_of_many_actions_the_first_are_told_and_the_others_counted(told: Told) -> None:
    texts = told.look(*range(64))
    assert texts[:-1] == [f"did {number}" for number in range(MAX_EVENTS - 1)]
    assert texts[-1].startswith("55 more changes")
    assert told.look(*range(64)) == []


def test_a_hub_that_makes_up_actions_makes_few_events(told: Told) -> None:
    events, polls, seen = 0, 720, 0
    for poll in range(polls):
        texts = told.look(*range(poll * 64, poll * 64 + 64))
        events, seen = events + len(texts), seen + bool(texts)
        told.now += 5
    assert seen > polls / 4, "what is new is told on and on"
    assert events <= BUCKET_SIZE + polls * 5 / REFILL_S
    told.now += BUCKET_SIZE * REFILL_S
    assert told.look(NOW_MS) == [f"did {NOW_MS}"]


def test_what_has_no_turn_waits_for_one(told: Told) -> None:
    told.status, told.spent = Status(last_control=1), NOW + BUCKET_SIZE * REFILL_S
    assert told.look(1, 2) == []
    assert (told.wakes, told.status.last_control) == ([NOW + REFILL_S], 1)
    (told.now,) = told.wakes
    assert told.look(1, 2) == ["did 2"]
    told.spent = told.now + 1e6
    assert told.look(1, 2, 3) == ["did 3"], "a clock that was set back takes no turns"


def test_what_a_hub_no_longer_had_is_said_to_be_missing(told: Told) -> None:
    assert told.look(0) == ["did 0"]
    assert told.look(*range(HUB_MAX_CONTROLS))[0] == "did 1", "all that are new are still there"
    assert told.look(*range(HUB_MAX_CONTROLS, 2 * HUB_MAX_CONTROLS - 1))[0] == f"did {HUB_MAX_CONTROLS}"
    texts = told.look(*range(2 * HUB_MAX_CONTROLS + 5, 3 * HUB_MAX_CONTROLS + 5))
    assert texts[:2] == [GAP, f"did {2 * HUB_MAX_CONTROLS + 5}"] and len(texts) <= MAX_EVENTS
    assert told.look(*range(2 * HUB_MAX_CONTROLS + 5, 3 * HUB_MAX_CONTROLS + 5)) == []
    assert GAP not in Told().look(*range(HUB_MAX_CONTROLS)), "who sees a hub first does not know what was before"


def test_what_a_real_hub_has_forgotten_is_said_to_be_missing(told: Told) -> None:
    log = AuditLog(clock=lambda: NOW)

    def said() -> list[str]:
        kept = read_controls([dataclasses.asdict(one) for one in log.all()])
        return told.look(*(one.id for one in kept))

    log.note("jane", "started run 1")
    assert said() == [f"did {NOW_MS}"]
    for _ in range(250):
        log.note("jane", "cancelled run 1")
    assert GAP not in said()
    for _ in range(300):
        log.note("jane", "cancelled run 1")
    assert GAP in said()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sets(st.integers(0, 40), max_size=40), st.floats(0, 30)), max_size=6))
def test_each_action_is_told_or_counted_once(looks: list[tuple[set[int], float]]) -> None:
    told, accounted = Told(), 0
    kept = set[int]()
    for numbers, pause in looks:
        kept |= {number + max(kept, default=0) for number in numbers}
        for text in told.look(*kept):
            accounted += 1 if text.startswith("did") else int(text.split()[0])
        told.now += pause
    told.now += BUCKET_SIZE * REFILL_S
    for text in told.look(*kept):
        accounted += 1 if text.startswith("did") else int(text.split()[0])
    assert accounted == len(kept)
