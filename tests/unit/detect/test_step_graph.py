"""The dependency graph of a step: exact matching, a topological order, and a replay that gives the recorded times."""

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatronapp_analyzer.detect.effect import Remedy, seconds_lost
from megatronapp_analyzer.errors import GraphError
from megatronapp_analyzer.graph.build import StepGraph, build
from megatronapp_analyzer.graph.edges import EdgeKind, Seconds
from megatronapp_analyzer.graph.matching import match_messages
from megatronapp_analyzer.graph.replay import makespan_s, replay
from megatronapp_analyzer.graph.waits import attribute
from megatronapp_analyzer.model import (
    RANK_RECORD,
    Cause,
    Communicator,
    JobLayout,
    StepRecords,
    SubjectType,
    VerdictSubject,
)
from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, RecordKind

LAYOUTS = st.sampled_from(
    [
        {},
        {"dp": 3},
        {"pp": 2},
        {"pp": 4},
        {"pp": 2, "dp": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "vpp": 2, "dp": 2},
        {"pp": 4, "vpp": 2},
    ]
)


def _step(sim: ModuleType, layout: JobLayout, seed: int, **job: Any) -> StepRecords:
    simulator = sim.Simulator(sim.Job(layout=layout, noise=sim.SHARED_CPU, microbatches=8, **job), seed)
    views: list[StepRecords] = [simulator.step(0), simulator.step(1)]
    return views[-1]


def _record(
    rank: int, kind: RecordKind, start: int, length: int, *, comm: int = NO_COMM, ordinal: int = 0
) -> tuple[int, ...]:
    return (start, length // 8, 0, ordinal, 0, comm, NO_MICROBATCH, int(kind), 0, 0, 0, rank)


def _ends(graph: StepGraph) -> Any:
    return replay(graph, graph.edges.weight)[1 : 2 * len(graph.spans) : 2]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kwargs=LAYOUTS, seed=st.integers(0, 10_000), rendezvous=st.booleans())
def test_replay_with_recorded_durations_gives_the_recorded_step(
    sim: ModuleType, kwargs: dict[str, int], seed: int, rendezvous: bool
) -> None:
    graph = build(_step(sim, JobLayout.grid(**kwargs), seed, rendezvous=rendezvous))

    assert graph.unmatched == 0
    assert np.abs(_ends(graph) - graph.end_s).max() < 1e-9
    recorded = graph.end_s.max() - graph.start_s.min()
    assert makespan_s(graph, replay(graph, graph.edges.weight)) == pytest.approx(recorded)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kwargs=LAYOUTS, seed=st.integers(0, 10_000), fraction=st.floats(0.01, 0.4))
def test_lost_records_leave_an_ordered_graph_and_are_counted(
    sim: ModuleType, kwargs: dict[str, int], seed: int, fraction: float
) -> None:
    layout = JobLayout.grid(**kwargs)
    graph = build(_step(sim, layout, seed, lost_fraction=fraction))
    whole = build(_step(sim, layout, seed))

    assert np.isfinite(replay(graph, graph.edges.weight)).all()
    matched = graph.messages.matched.sum()
    assert matched <= whole.messages.matched.sum()
    lone = (graph.messages.recv_wait >= 0) & ~graph.messages.matched
    assert graph.unmatched >= lone.sum()


def test_a_lost_message_does_not_shift_the_matching_of_others(sim: ModuleType) -> None:
    view = _step(sim, JobLayout.grid(pp=2), 3)
    whole = match_messages(view.records, view.comms)
    victim = whole.send_post[2]
    rest = match_messages(np.delete(view.records, victim), view.comms)

    assert len(rest) == len(whole)
    assert (~rest.matched).sum() == 1
    assert rest.send_post[2] == -1


def test_messages_of_both_directions_are_apart() -> None:
    comms = {
        0: {0: Communicator("p2p", (0, 1)), 1: Communicator("p2p", (1, 0))},
        1: {5: Communicator("p2p", (1, 0)), 7: Communicator("p2p", (0, 1))},
    }
    rows = [
        _record(0, RecordKind.SEND_POST, 100, 8, comm=0),
        _record(0, RecordKind.RECV_WAIT, 108, 80, comm=1),
        _record(1, RecordKind.RECV_WAIT, 90, 40, comm=7),
        _record(1, RecordKind.SEND_POST, 130, 8, comm=5),
    ]
    messages = match_messages(np.array(rows, RANK_RECORD), comms)

    found = {(int(a), int(b)): (int(s), int(r)) for a, b, s, r in zip(
        messages.source, messages.destination, messages.send_post, messages.recv_wait, strict=True)}  # fmt: skip
    assert found == {(0, 1): (0, 2), (1, 0): (3, 1)}


@pytest.mark.parametrize(("first_post_ms", "waiting"), [(1, 2), (9, 0)])
def test_pairs_of_which_a_send_ended_before_its_receive_was_posted_are_eager(first_post_ms: int, waiting: int) -> None:
    """Two messages: the first send ends after 5 ms, the second one after 15 ms, 1 ms after its receive was posted."""
    comms = {0: {0: Communicator("p2p", (0, 1))}, 1: {0: Communicator("p2p", (0, 1))}}
    rows = []
    for ordinal, (end_ms, post_ms) in enumerate([(5, first_post_ms), (15, 14)]):
        sent = 1_000_000 * (end_ms - 4)
        posted = 1_000_000 * post_ms
        rows += [
            _record(0, RecordKind.SEND_POST, sent, 8, comm=0, ordinal=ordinal),
            _record(0, RecordKind.SEND_WAIT, sent + 80, 4_000_000 - 80, comm=0, ordinal=ordinal),
            _record(1, RecordKind.RECV_POST, posted, 8, comm=0, ordinal=ordinal),
            _record(1, RecordKind.RECV_WAIT, posted + 80, 3_000_000, comm=0, ordinal=ordinal),
        ]
    records = np.array(sorted(rows, key=lambda row: (row[-1], row[0])), RANK_RECORD)
    graph = build(StepRecords(attempt=0, step=0, records=records, comms=comms))
    assert np.count_nonzero(graph.edges.kind == EdgeKind.READY) == waiting


def test_waits_are_no_weights(sim: ModuleType) -> None:
    """A receive whose sender is twice as slow keeps its small weight: only the sender's span grew."""
    layout = JobLayout.grid(pp=2)
    slow = sim.Fault(rank=0, kind="compute", factor=3.0)
    views = [
        sim.Simulator(sim.Job(layout=layout, microbatches=8, faults=faults), 1).step(0) for faults in ((), (slow,))
    ]
    for view in views:
        graph = build(view)
        receives = graph.spans["kind"][graph.edges.span] == RecordKind.RECV_WAIT
        waits = receives & (graph.edges.kind != EdgeKind.GAP)
        assert graph.edges.weight[waits].max() < 1e-3


def test_waits_are_attributed_to_the_rank_that_was_late(sim: ModuleType) -> None:
    layout = JobLayout.grid(pp=2, dp=2)
    fault = sim.Fault(rank=1, kind="compute", factor=3.0)
    simulator = sim.Simulator(sim.Job(layout=layout, faults=(fault,), microbatches=8), 1)
    waits = attribute(build([simulator.step(0), simulator.step(1)][-1]))

    blamed = np.bincount(waits.cause, weights=waits.seconds, minlength=4)
    assert blamed.argmax() == 1
    imposed = waits.imposed_by((1,))
    assert set(imposed) >= {3}
    assert 1 not in imposed


def test_faster_compute_shortens_the_replayed_step(sim: ModuleType) -> None:
    view = _step(sim, JobLayout.grid(pp=2, dp=2), 5)
    graph = build(view)
    half = graph.edges.weight.copy()
    half[graph.spans["kind"][graph.edges.span] == RecordKind.BACKWARD] /= 2
    both = makespan_s(graph, replay(graph, np.stack([graph.edges.weight, half], axis=1)))

    assert both.shape == (2,)
    assert both[1] < both[0]


def test_costs_are_those_of_the_given_replayer(sim: ModuleType) -> None:
    graph = build(_step(sim, JobLayout.grid(pp=2), 5))
    subject = VerdictSubject(type=SubjectType.RANK, ranks=(1,))
    remedy = Remedy(subject=subject, cause=Cause.COMPUTE, ratio=2.0, excess_s=0.0)

    def unaffected(graph: StepGraph, weights: Seconds) -> Seconds:
        return np.ones((graph.events, *weights.shape[1:]))

    assert seconds_lost(graph, [remedy])[0] > 0
    assert seconds_lost(graph, [remedy], unaffected)[0] == 0


def test_operations_that_wait_for_each_other_in_a_circle_are_refused() -> None:
    """Two receives, each posted before the other's send: no clock can produce this, only a broken one."""
    comms = {rank: {0: Communicator("p2p", (0, 1)), 1: Communicator("p2p", (1, 0))} for rank in (0, 1)}
    rows = [
        _record(0, RecordKind.RECV_WAIT, 0, 800, comm=1),
        _record(0, RecordKind.SEND_POST, 800, 8, comm=0),
        _record(1, RecordKind.RECV_WAIT, 0, 880, comm=0),
        _record(1, RecordKind.SEND_POST, 880, 8, comm=1),
    ]
    view = StepRecords(attempt=0, step=0, records=np.array(rows, RANK_RECORD), comms=comms)
    with pytest.raises(GraphError, match="circle"):
        build(view)


def test_spans_after_the_end_of_the_step_do_not_belong_to_it(sim: ModuleType) -> None:
    view = _step(sim, JobLayout.grid(pp=2), 1)
    extra = np.array([_record(0, RecordKind.EVALUATE, view.end_ns + 1_000_000, 8_000_000_000)], RANK_RECORD)
    records = np.concatenate([view.records, extra])
    longer = dataclasses.replace(view, records=records[np.lexsort((records["start_ns"], records["rank"]))])

    assert len(build(longer).spans) == len(build(view).spans)


def test_an_empty_step_has_an_empty_graph() -> None:
    graph = build(StepRecords(attempt=0, step=0, records=np.empty(0, RANK_RECORD), comms={}))
    assert graph.events == 0
    assert makespan_s(graph, replay(graph, graph.edges.weight)) == 0.0
