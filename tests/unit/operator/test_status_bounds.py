"""Any report of hub, launcher and containers becomes a status that the API server takes."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from worker_groups import worker_groups

from megatronapp_common.job import status_document
from megatronapp_common.job.api.analyzer import SlowRank
from megatronapp_common.job.api.status import (
    ConditionType,
)
from megatronapp_common.text.terminal import to_single_line
from megatronapp_operator.backends.kubernetes.execution.events import MAX_NOTE, _event
from megatronapp_operator.backends.kubernetes.pod_record import _number
from megatronapp_operator.backends.kubernetes.render.settings import JobOwner
from megatronapp_operator.plan import EventType, JobSpec, JobState, Observed, RecordEvent, Status
from megatronapp_operator.plan.plan_builder import PlanBuilder
from megatronapp_operator.plan.policies import report
from megatronapp_operator.plan_io.hub_summary import UNREADABLE, HubSummary, read_progress, read_summary

STORED = TypeAdapter(Status)
MOST_BYTES = 1 << 20
NUMBERS = st.one_of(
    st.integers(), st.sampled_from([2**63, -(2**63) - 1, 10**400, True]), st.floats(), st.text(max_size=3)
)
TIMES = st.sampled_from(
    ["2026-01-01T00:00:00Z", "0001-01-01T00:00:00+23:00", "9999-12-31T23:59:59-23:00", "now", 7, None]
)
TEXTS = st.one_of(st.text(max_size=40), st.sampled_from(["x" * 5000, "\U0001f9ea" * 5000]), st.integers())
PLANS = st.fixed_dictionaries(
    {
        **dict.fromkeys(["fromStep", "microbatches", "chunks", "capChunks", "spareChunks"], NUMBERS),
        **dict.fromkeys(["schedule", "plan"], TEXTS),
        "chosen": st.booleans(),
    },
    optional=dict.fromkeys(["simulatedSeconds", "simulatedBubble", "staticBubble", "measuredSeconds"], NUMBERS),
)
PAGES = st.fixed_dictionaries(
    {"iteration": NUMBERS},
    optional={
        **dict.fromkeys(["attempt", "totalIterations", "loss", "tokensPerSecond", "secondsLeft", "gradNorm"], NUMBERS),
        "consumedSamples": NUMBERS,
        "updatedAt": TIMES,
        "state": TEXTS,
        "plans": st.one_of(st.none(), NUMBERS, st.lists(PLANS, max_size=10)),
    },
)
VERDICTS = st.fixed_dictionaries(
    {
        "id": TEXTS,
        "subject": st.fixed_dictionaries(
            {"type": st.just("rank") | TEXTS, "ranks": st.lists(NUMBERS, max_size=4)},
            optional={"node": TEXTS, "worker": NUMBERS},
        ),
        "cause": TEXTS,
        "state": st.just("confirmed"),
        "sentence": TEXTS,
    },
    optional={
        "since": st.fixed_dictionaries({}, optional={"attempt": NUMBERS, "step": NUMBERS, "time": NUMBERS}),
        "effect": st.fixed_dictionaries(
            {}, optional=dict.fromkeys(["slowdown", "secondsPerStep", "gpuHours", "cost"], NUMBERS)
        ),
    },
)
SUMMARIES = st.fixed_dictionaries(
    {
        "attempt": NUMBERS,
        "progress": st.one_of(st.none(), PAGES),
        "slowRanks": st.lists(VERDICTS, max_size=3),
        "hungRanks": st.lists(NUMBERS, max_size=4),
    }
)

NAMELESS = {
    "id": "",
    "subject": {"type": "rank", "ranks": [1]},
    "cause": "compute",
    "state": "confirmed",
    "sentence": "",
}


def numbers(document: Any) -> Iterator[int]:
    if isinstance(document, dict | list):
        for value in document.values() if isinstance(document, dict) else document:
            yield from numbers(value)
    elif isinstance(document, int):
        yield document


def written(summary: HubSummary | None) -> dict[str, Any]:
    """The document of the status after a look with this summary."""
    return status_document(reported(summary, Status(running_time=5.0, attempt=2**31 - 1)))


def reported(summary: HubSummary | None, before: Status) -> Status:
    """The status after a look with this summary."""
    observed = Observed(secret=True)
    if summary is not None:
        observed = dataclasses.replace(
            observed, progress=summary.progress, slow_ranks=summary.slow_ranks, hung_ranks=summary.hung_ranks
        )
    job = JobState(
        spec=JobSpec(name="job", uid="u", worker_groups=worker_groups(1)),
        status=before,
    )
    draft = PlanBuilder(job=job, observed=observed, now=1000.0, status=job.status)
    report.progress(draft)
    report.slow_ranks(draft)
    report.stalls(draft)
    return draft.status


def check(document: dict[str, Any]) -> None:
    text = json.dumps(document, allow_nan=False)
    assert len(text.encode()) < MOST_BYTES
    STORED.validate_json(text)
    assert all(-(2**63) <= number < 2**63 for number in numbers(document))


@settings(deadline=None)
@example({"attempt": 0, "progress": None, "slowRanks": [NAMELESS], "hungRanks": []})
@given(SUMMARIES)
def test_every_answer_of_a_hub_becomes_a_status_that_can_be_written(summary: Any) -> None:
    check(written(read_summary(summary)))


@settings(deadline=None)
@given(PAGES)
def test_every_page_of_a_launcher_becomes_a_status_that_can_be_written(page: Any) -> None:
    try:
        progress = read_progress(page)
    except UNREADABLE:
        return
    check(written(HubSummary(progress=progress)))


def test_the_largest_answer_of_a_hub_fits_into_a_status() -> None:
    text = "\U0001f9ea" * 5000
    subject = {"type": text, "ranks": [2**62] * 5000, "node": text}
    verdict = {"id": text, "subject": subject, "cause": text, "state": "confirmed", "sentence": text}
    summary = read_summary({"attempt": 0, "progress": None, "slowRanks": [verdict] * 100, "hungRanks": []})
    assert summary is not None and summary.slow_ranks
    check(written(summary))
    on_nodes = [verdict | {"subject": subject | {"type": "group", "node": f"{number}{text}"}} for number in range(64)]
    named = read_summary({"attempt": 0, "progress": None, "slowRanks": on_nodes, "hungRanks": []})
    assert written(named)["slowNodes"]
    check(written(named))
    honest = verdict | {"id": "v", "subject": {"type": "rank", "ranks": [3]}, "cause": "compute", "sentence": "x" * 500}
    many = read_summary({"attempt": 0, "progress": None, "slowRanks": [honest] * 64, "hungRanks": []})
    assert many is not None and many.slow_ranks is not None and len(many.slow_ranks) == 64
    document = written(many)
    check(document)
    assert [
        len(condition["message"]) for condition in document["conditions"] if condition["type"] == "SlowNodeDetected"
    ] == [64 * 501 - 1]


@given(st.text())
def test_the_note_of_an_event_is_truncated_in_bytes_between_characters(text: str) -> None:
    owner = JobOwner(namespace="n", name="j", uid="u")
    event = RecordEvent(type=EventType.NORMAL, reason="R", message=to_single_line(text) * 200)
    note = _event(owner, event, "me")["note"].encode()
    assert len(note) <= MAX_NOTE and event.message.encode().startswith(note)
    assert len(note) > MAX_NOTE - 4 or note == event.message.encode()


def test_numbers_of_a_record_that_no_status_holds_are_none() -> None:
    assert [_number(number) for number in (0, 2**31 - 1, 2**31, -1, True, "1", None)] == [0, 2**31 - 1, *[None] * 5]


def test_a_summary_gives_progress_verdicts_and_hung_ranks() -> None:
    verdict = {
        "id": "v1",
        "subject": {"type": "rank", "ranks": [1], "worker": 0, "node": "node-0"},
        "cause": "compute",
        "state": "confirmed",
        "effect": {"secondsPerStep": 0.1, "slowdown": 2.0, "gpuHours": 1.5, "cost": 3.75},
        "confidence": 0.9,
        "since": {"attempt": 0, "step": 60, "time": 1.0},
        "sentence": "Rank 1 is slow.",
    }
    read = read_summary({"attempt": 2, "progress": {"iteration": 4}, "slowRanks": [verdict], "hungRanks": [3]})
    assert read is not None and read.progress is not None
    assert (read.attempt, read.progress.iteration, read.hung_ranks) == (2, 4, (3,))
    assert read.slow_ranks is not None
    (slow,) = read.slow_ranks
    assert (slow.ranks, slow.cause, slow.since_step, slow.slowdown) == ((1,), "compute", 60, 2.0)
    assert (slow.gpu_hours, slow.cost) == (1.5, 3.75)


def test_without_a_detector_verdicts_are_unknown_and_the_status_keeps_those_before() -> None:
    slow = SlowRank(id="v", subject="rank", ranks=(1,), cause="compute", state="confirmed", sentence="Rank 1 is slow.")
    before = reported(HubSummary(slow_ranks=(slow,), hung_ranks=(1,)), Status(running_time=5.0))
    assert before.is_true(ConditionType.SLOW_NODE_DETECTED) and before.is_true(ConditionType.STALLED)
    unknown = read_summary({"attempt": 0, "progress": None, "slowRanks": None, "hungRanks": None})
    assert unknown is not None
    assert (unknown.slow_ranks, unknown.hung_ranks) == (None, None)
    assert reported(unknown, before) == before
