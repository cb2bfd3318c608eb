"""The plan's memory: a status that is written, and read again by an operator that was started in between."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pytest_workers import examples

from megatronapp_common.job import EndedWorker, PinnedSettings, read_status, status_document
from megatronapp_common.text.ranges import format_ranges, parse_ranges
from megatronapp_operator.plan import (
    Condition,
    ConditionType,
    Deletion,
    ExcludedNode,
    Failure,
    FailureAction,
    Observed,
    Phase,
    Progress,
    Replicas,
    SlowNodeCost,
    SlowRank,
    Status,
    Worker,
    WorkerOutcome,
    WorkerPhase,
)
from megatronapp_operator.plan.worker_history import ended_worker_record, whole_gang

COUNTS = st.integers(0, 2**31 - 1)
TIMES = st.floats(0, 4e9).map(lambda seconds: round(seconds, 6))
SECONDS = st.integers(0, 4_000_000_000).map(float)
TEXTS = st.text("abcXYZ 09\n\u00e9\u4e00", min_size=1, max_size=12)
REALS = st.floats(allow_nan=False, allow_infinity=False)
MAYBE_COUNT, MAYBE_TIME = st.none() | COUNTS, st.none() | TIMES
MAYBE_TEXT, MAYBE_REAL = st.none() | TEXTS, st.none() | REALS
STATES = st.sampled_from(["starting", "training", "done"])
OUTCOMES = st.builds(
    WorkerOutcome, code=st.integers(0, 255), reason=TEXTS, message=TEXTS, rank=MAYBE_COUNT, signal=MAYBE_COUNT
)
DELETIONS = st.builds(Deletion, since=TIMES, grace_s=st.floats(0, 1e6))
FAILED = st.builds(
    Worker, index=COUNTS, attempt=st.just(3), phase=st.just(WorkerPhase.FAILED), node=MAYBE_TEXT, disrupted=MAYBE_TEXT,
    started_at=MAYBE_TIME, finished_at=MAYBE_TIME, outcome=st.none() | OUTCOMES, deletion=st.none() | DELETIONS,
)  # fmt: skip
FACTS = {
    "world_size": MAYBE_COUNT, "data_parallel_size": MAYBE_COUNT, "manager": MAYBE_TEXT, "hub_url": MAYBE_TEXT,
    "serve_url": MAYBE_TEXT, "rank_table": st.none() | st.just({"attempt": 1, "digest": "d", "workers": []}),
    "pinned": st.none() | st.builds(
        PinnedSettings, attempt=COUNTS, trainer_image=TEXTS, analyzer_image=TEXTS, template_hash=TEXTS, key_id=TEXTS,
        generation=COUNTS,
    ),
}  # fmt: skip
SLOW = st.builds(
    SlowRank, id=TEXTS, subject=TEXTS, ranks=st.lists(COUNTS, max_size=3).map(tuple), cause=TEXTS, state=TEXTS,
    sentence=TEXTS, since_step=MAYBE_COUNT, slowdown=MAYBE_REAL, seconds_per_step=MAYBE_REAL, worker=MAYBE_COUNT,
    node=MAYBE_TEXT, since_attempt=MAYBE_COUNT, since_time=MAYBE_REAL,
)  # fmt: skip
SLOW_NODES = st.builds(
    SlowNodeCost, node=TEXTS, ranks=st.lists(COUNTS, max_size=3).map(tuple), gpu_hours=MAYBE_REAL, cost=MAYBE_REAL,
    causes=st.lists(TEXTS, max_size=2).map(tuple), since=MAYBE_TIME,
)  # fmt: skip
FAILURES = st.builds(
    Failure, time=TIMES, attempt=COUNTS, reason=TEXTS, message=TEXTS, action=st.sampled_from(FailureAction),
    worker=MAYBE_COUNT, node=MAYBE_TEXT, rank=MAYBE_COUNT, exit_code=MAYBE_COUNT, signal=MAYBE_COUNT,
)  # fmt: skip
PAGES = st.builds(
    Progress, attempt=COUNTS, iteration=COUNTS, total_iterations=MAYBE_COUNT, state=STATES, loss=MAYBE_REAL,
    learning_rate=MAYBE_REAL, grad_norm=MAYBE_REAL, tokens_per_second=MAYBE_REAL, tflops_per_gpu=MAYBE_REAL,
    seconds_left=MAYBE_REAL, consumed_samples=MAYBE_COUNT, validation_loss=MAYBE_REAL,
    updated_at=st.none() | SECONDS,
)  # fmt: skip
ENDS = (ConditionType.COMPLETE, ConditionType.FAILED, ConditionType.SUSPENDED)


def conditions() -> st.SearchStrategy[tuple[Condition, ...]]:
    """One of each type at most, and none that decides over the phase."""
    kinds = st.lists(st.sampled_from([kind for kind in ConditionType if kind not in ENDS]), unique=True)
    condition = {"status": st.booleans(), "reason": TEXTS, "message": TEXTS, "since": SECONDS, "generation": COUNTS}
    return kinds.flatmap(
        lambda found: st.tuples(*(st.builds(Condition, type=st.just(kind), **condition) for kind in found))
    )


@st.composite
def statuses(draw: st.DrawFn) -> Status:
    attempt = draw(COUNTS)
    ended = st.builds(
        EndedWorker, index=COUNTS, node=MAYBE_TEXT, disrupted=MAYBE_TEXT, started_at=MAYBE_TIME,
        finished_at=MAYBE_TIME, deleted_at=MAYBE_TIME, grace_seconds=st.none() | st.floats(0, 1e6),
        exit_code=st.none() | st.integers(0, 255), reason=MAYBE_TEXT, message=MAYBE_TEXT, rank=MAYBE_COUNT,
        signal=MAYBE_COUNT,
    )  # fmt: skip
    made = st.builds(
        Status, phase=st.sampled_from([phase for phase in Phase if phase not in {Phase.SUCCEEDED, Phase.FAILED}]),
        conditions=conditions(), generation=COUNTS, attempt=st.just(attempt), restarts=COUNTS,
        restarts_towards_max=COUNTS, start_time=MAYBE_TIME, attempt_time=MAYBE_TIME, holding_time=MAYBE_TIME,
        scheduled_time=MAYBE_TIME, running_time=MAYBE_TIME, last_restart_time=MAYBE_TIME, completion_time=MAYBE_TIME,
        released=COUNTS, released_time=MAYBE_TIME, initialized=st.booleans(), init_restarts=COUNTS,
        init_clearing=st.booleans(), active_s=TIMES, groups=st.none() | st.lists(COUNTS, max_size=3).map(tuple),
        init_failed_time=MAYBE_TIME, progress=st.none() | PAGES, progress_time=MAYBE_TIME, slow_node=MAYBE_TEXT,
        excluded_nodes=st.lists(st.builds(ExcludedNode, node=TEXTS, reason=TEXTS, until=TIMES), max_size=2).map(tuple),
        succeeded=st.sets(st.integers(0, 5000), max_size=8).map(lambda found: tuple(sorted(found))),
        ended=st.lists(ended, max_size=2).map(tuple), slow_ranks=st.lists(SLOW, max_size=2).map(tuple),
        slow_nodes=st.lists(SLOW_NODES, max_size=2).map(tuple),
        hung_ranks=st.lists(COUNTS, max_size=3).map(tuple), last_control=st.none() | st.integers(0, 1 << 53),
        replicas=st.builds(Replicas, desired=COUNTS, pending=COUNTS, running=COUNTS, succeeded=COUNTS, failed=COUNTS),
        failures=st.lists(FAILURES, max_size=2).map(tuple), **FACTS,
    )  # fmt: skip
    return draw(made)


@settings(max_examples=examples(40))
@given(statuses())
def test_a_status_is_read_as_it_was_written_and_the_types_keep_all_of_it(status: Status) -> None:
    text = json.dumps(status_document(status), allow_nan=False)
    assert read_status(json.loads(text)) == TypeAdapter(Status).validate_json(text) == status
    assert json.dumps(status_document(read_status(json.loads(text)))) == text


@given(FAILED)
def test_a_failed_worker_is_on_record_as_it_was_seen(worker: Worker) -> None:
    status = Status(attempt=3, ended=(ended_worker_record(worker),))
    assert whole_gang(Observed(), status) == (worker,)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ABSENT = ("progress", "startTime", "slowNode", "slowNodes", "succeededWorkers")
NAMES = sorted(status_document(Status()) | dict.fromkeys(ABSENT, 0))


@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING))
def test_a_status_of_any_shape_is_read(document: dict[str, Any]) -> None:
    json.dumps(status_document(read_status(document)), allow_nan=False)


def test_a_status_of_nothing_is_that_of_a_new_job() -> None:
    assert read_status(None) == read_status({}) == Status()


def test_fields_that_say_nothing_are_not_written() -> None:
    silent = {"succeededWorkers", "activeSeconds", "initClearing", "progress", "startTime", "pinned"}
    assert not silent & status_document(Status()).keys()
    assert status_document(Status(succeeded=(0,), active_s=1.5, init_clearing=True)).keys() > {
        "succeededWorkers",
        "activeSeconds",
        "initClearing",
    }


OLDER = {
    "phase": "Running",
    "observedGeneration": 1,
    "conditions": [
        {
            "type": "Running",
            "status": "True",
            "reason": "TrainingBegan",
            "message": "",
            "lastTransitionTime": "2026-11-20T10:00:00Z",
        },
        {"type": "InventedLater", "status": "True"},
    ],
    "attempt": 1,
    "restarts": 1,
    "restartsTowardsMax": 1,
    "runningTime": "2026-11-20T10:00:00Z",
    "replicaStatuses": {"desired": 2, "running": 2, "ready": 2},
    "slowRanks": [{"id": "v", "subject": {"type": "rank", "ranks": [1]}, "cause": "compute", "state": "confirmed"}],
    "hubUrl": "http://127.0.0.1:1",
}


def test_a_status_of_the_release_before_is_read() -> None:
    status = read_status(OLDER)
    assert (status.phase, status.attempt, status.restarts_towards_max) == (Phase.RUNNING, 1, 1)
    assert status.is_true(ConditionType.RUNNING)
    assert [condition.type for condition in status.conditions] == [ConditionType.RUNNING]
    assert (status.running_time, status.attempt_time, status.released) == (1795168800.0, None, 0)
    assert status.slow_ranks[0].node is None


@pytest.mark.parametrize("phase", ["Running", "Gone", None])
def test_a_job_with_a_terminal_condition_has_ended_whatever_its_phase(phase: str | None) -> None:
    end = {"type": "Failed", "status": "True", "lastTransitionTime": "2026-11-20T10:00:00Z"}
    status = read_status({"phase": phase, "conditions": [end]})
    assert (status.phase, status.completion_time) == (Phase.FAILED, 1795168800.0)


@given(st.sets(st.integers(0, 60)))
def test_worker_numbers_are_abbreviated_as_ranges(numbers: set[int]) -> None:
    assert parse_ranges(format_ranges(sorted(numbers))) == tuple(sorted(numbers))


def test_ranges_are_formatted_and_parsed() -> None:
    assert format_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert parse_ranges("3-1,x,-,2-,99-,1-9999999999")[:2] == (1, 2)
