"""Counters of workers in the hub: bounded memory, and the reasons that verdicts get from them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.hub.ingest.counter_history import LEAST_ROWS, CounterHistory
from megatronapp_analyzer.hub.ingest.ingest import TraceIngest
from megatronapp_analyzer.hub.ingest.store import StoreLimits
from megatronapp_analyzer.hub.state.verdict_reasons import VerdictReasons
from megatronapp_analyzer.hub.state.verdicts import VerdictStore
from megatronapp_analyzer.model import Cause, JobMoment, Reason, SubjectType, Verdict, VerdictState, VerdictSubject
from megatronapp_common.trace import RECORD, Counter, RecordKind

MS = 1_000_000
STEP_NS = 10 * MS
BEGIN_NS = 1_000 * MS
"""Begin of step 0, on the clocks of both workers."""
SINCE = 40
STEPS = 60
HEALTHY = {
    Counter.GPU_SM_CLOCK_MHZ: 1980.0,
    Counter.GPU_THROTTLE_REASONS: 0.0,
    Counter.GPU_MEMORY_USED_MIB: 60_000.0,
    Counter.CPU_THROTTLED: 0.0,
    Counter.CPU_STEAL: 0.0,
}


def samples(time_ns: int, values: dict[Counter, float], device: int = 0) -> Any:
    """Return the records of one moment."""
    rows = np.zeros(len(values), RECORD)
    rows["kind"], rows["start_ns"], rows["ordinal"] = RecordKind.COUNTER, time_ns, device
    rows["comm"] = [int(counter) for counter in values]
    rows["aux"] = np.array(list(values.values()), "<f4").view("<u4")
    return rows


@pytest.fixture
def job(step_rows: Any, ring_header: Any) -> Callable[..., TraceIngest]:
    """Return a job of two workers with a rank each, whose counters change with a fault of rank 1."""

    def run(fault: dict[Counter, float], device: str = "cuda:0") -> TraceIngest:
        ingest = TraceIngest(StoreLimits())
        first = [0, 0]
        for rank in (0, 1):
            header = ring_header(rank)
            header["metadata"]["device"] = device
            ingest.add_ring(0, header)
        for step in range(STEPS):
            for rank in (0, 1):
                body = step_rows(rank, step)
                ingest.add_records(0, {"rank": rank, "worker": rank, "first": first[rank], "lost": 0}, body.tobytes())
                first[rank] += len(body)
                is_slow = rank == 1 and step >= SINCE
                found = samples(BEGIN_NS + step * STEP_NS, HEALTHY | (fault if is_slow else {}))
                index = step * len(found)
                ingest.add_records(0, {"rank": None, "worker": rank, "first": index, "lost": 0}, found.tobytes())
        return ingest

    return run


def verdict(cause: Cause = Cause.COMPUTE, *, last: int = 55, **changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "id": "v",
        "subject": VerdictSubject(type=SubjectType.RANK, ranks=(1,)),
        "cause": cause,
        "state": VerdictState.CONFIRMED,
        "seconds_per_step": 0.003,
        "seconds_lost": 0.03,
        "slowdown": 1.5,
        "confidence": 0.9,
        "evidence_steps": tuple(range(SINCE, last + 1)),
        "evidence_text": ("from the detector",),
        "since": JobMoment(attempt=0, step=SINCE, time=0.0),
    }
    return Verdict(**(fields | changes))


THROTTLED = {Counter.GPU_SM_CLOCK_MHZ: 1200.0, Counter.GPU_THROTTLE_REASONS: 4.0}


def test_a_verdict_has_the_reason_that_counters_of_its_device_show(job: Callable[..., TraceIngest]) -> None:
    found = VerdictReasons(job(THROTTLED)).explain(verdict())
    assert (found.cause, found.reason) == (Cause.COMPUTE, Reason.DOWN_CLOCK)
    assert found.evidence_text == (
        "from the detector",
        "SM clock 1.20 GHz, 1.98 GHz on the other device, 1.98 GHz before; throttled by: power cap",
    )


def test_a_healthy_device_of_a_suspect_is_evidence_without_a_reason(job: Callable[..., TraceIngest]) -> None:
    found = VerdictReasons(job({})).explain(verdict())
    assert found.reason is None
    assert found.evidence_text[1:] == ("SM clock 1.98 GHz, 1.98 GHz on the other device, 1.98 GHz before",)


def test_more_memory_in_use_with_the_fault_is_contention(job: Callable[..., TraceIngest]) -> None:
    found = VerdictReasons(job({Counter.GPU_MEMORY_USED_MIB: 60_600.0})).explain(verdict())
    assert found.reason is Reason.CONTENTION
    assert "memory in use on the device has grown by 600 MiB more than on the others, to 60600 MiB" in (
        found.evidence_text
    )


def test_stolen_and_withheld_processors_are_reasons_of_hosts(job: Callable[..., TraceIngest]) -> None:
    throttled = VerdictReasons(job({Counter.CPU_THROTTLED: 0.4}, "cpu")).explain(verdict(Cause.HOST))
    assert throttled.reason is Reason.CPU_THROTTLED
    stolen = VerdictReasons(job({Counter.CPU_STEAL: 0.2}, "cpu")).explain(verdict(Cause.HOST, reason=Reason.STOPPED))
    assert stolen.reason is Reason.CPU_STEAL
    stopped = VerdictReasons(job({}, "cpu")).explain(verdict(Cause.HOST, reason=Reason.STOPPED))
    assert (stopped.reason, stopped.evidence_text) == (Reason.STOPPED, ("from the detector",))


@pytest.mark.parametrize("cause", sorted(set(Cause) - {Cause.COMPUTE, Cause.HOST, Cause.MEMORY}))
def test_other_causes_have_no_reason_while_clocks_are_alike(cause: Cause, job: Callable[..., TraceIngest]) -> None:
    assert VerdictReasons(job({})).explain(verdict(cause)).reason is None


def test_a_reason_is_not_lost_with_later_samples_and_ends_with_the_verdict(job: Callable[..., TraceIngest]) -> None:
    ingest = job(THROTTLED)
    reasons = VerdictReasons(ingest)
    found = reasons.explain(verdict(last=45))
    assert found.reason is Reason.DOWN_CLOCK
    ingest.counter_history = CounterHistory()
    later = verdict(last=58)
    assert reasons.explain(later).reason is Reason.DOWN_CLOCK
    cleared = reasons.explain(verdict(last=58, state=VerdictState.CLEARED))
    assert (cleared.reason, cleared.evidence_text) == (found.reason, found.evidence_text)
    assert reasons.explain(later).reason is None, "nothing is left of a cleared verdict"


def test_a_fault_of_the_first_steps_has_no_time_before(job: Callable[..., TraceIngest]) -> None:
    since = JobMoment(attempt=0, step=3, time=0.0)
    found = VerdictReasons(job(THROTTLED)).explain(verdict(since=since))
    assert found.reason is Reason.DOWN_CLOCK
    assert found.evidence_text[1].startswith("SM clock 1.20 GHz, 1.98 GHz on the other device; throttled")


def test_ranks_and_attempts_that_are_not_known_change_nothing(job: Callable[..., TraceIngest]) -> None:
    reasons = VerdictReasons(job(THROTTLED))
    for stranger in (
        verdict(subject=VerdictSubject(type=SubjectType.RANK, ranks=(7,))),
        verdict(since=JobMoment(attempt=9, step=SINCE, time=0.0)),
        verdict(evidence_steps=()),
        verdict(evidence_steps=(500,)),
    ):
        assert reasons.explain(stranger) == stranger


def test_stored_verdicts_have_their_reason_and_older_ones_none(tmp_path: Path, job: Callable[..., TraceIngest]) -> None:
    path = tmp_path / "verdicts.json"
    store = VerdictStore(path)
    store.explain = VerdictReasons(job(THROTTLED)).explain
    store.update([verdict()])
    assert [each["reason"] for each in VerdictStore(path).all()] == ["down-clock"]
    (document,) = json.loads(path.read_text())
    del document["reason"]
    path.write_text(json.dumps([document]))
    assert [each["reason"] for each in VerdictStore(path).all()] == [None]


SECOND_NS = 1_000_000_000


def fill(history: CounterHistory, *, workers: int, devices: int, seconds: int, attempt: int = 0) -> None:
    clocks = dict.fromkeys((Counter.GPU_SM_CLOCK_MHZ, Counter.GPU_TEMPERATURE_C, Counter.GPU_POWER_W), 7.0)
    for second in range(seconds):
        for worker in range(workers):
            rows = [samples(second * SECOND_NS, clocks, device) for device in range(devices)]
            history.add(attempt, worker, np.concatenate(rows))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 300))
def test_memory_of_counters_is_bounded_and_has_the_newest(workers: int, devices: int, seconds: int) -> None:
    limit = 64 << 10
    history = CounterHistory(limit, most_rows=256)
    fill(history, workers=workers, devices=devices, seconds=seconds)
    assert history.nbytes <= limit
    for worker in range(workers):
        newest = history.select(0, worker, [((seconds - 1) * SECOND_NS, seconds * SECOND_NS)])
        assert newest is not None
        assert newest.median(Counter.GPU_SM_CLOCK_MHZ, devices - 1) == 7.0
        every = history.select(0, worker, [(0, seconds * SECOND_NS)])
        assert every is not None
        assert min(seconds, LEAST_ROWS // 2) <= len(every.values) <= min(seconds, 256)


def test_counters_of_older_attempts_leave_first() -> None:
    history = CounterHistory(10 << 10)
    fill(history, workers=1, devices=4, seconds=20)
    assert history.select(0, 0, [(0, 20 * SECOND_NS)]) is not None
    fill(history, workers=4, devices=4, seconds=20, attempt=1)
    assert history.select(0, 0, [(0, 20 * SECOND_NS)]) is None
    assert history.nbytes <= 10 << 10


def test_garbage_in_a_ring_takes_no_memory() -> None:
    history = CounterHistory(most_rows=64)
    rows = np.zeros(100_000, RECORD)
    rows["kind"], rows["comm"] = RecordKind.COUNTER, Counter.GPU_SM_CLOCK_MHZ
    rows["ordinal"] = np.arange(len(rows))
    rows["start_ns"][:] = np.uint64((1 << 64) - 1)
    history.add(0, 0, rows)
    not_finite = samples(0, {Counter.GPU_SM_CLOCK_MHZ: float("nan"), Counter.GPU_POWER_W: float("inf")})
    history.add(0, 1, not_finite)
    assert history.nbytes < 1 << 20
    assert history.select(0, 1, [(0, 10)]) is None
