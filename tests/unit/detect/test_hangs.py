"""Culprits of a hang, and the ranks that only wait for them."""

import dataclasses
from types import ModuleType

import pytest

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.detect.hang_search import find
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.model import Cause, CurrentSpan, JobLayout, RankLiveness, VerdictState
from megatronapp_common.trace import RecordKind

NOW_NS = 1_000_000_000_000
SETTINGS = DetectorSettings()


def _rank(
    rank: int,
    silent_s: float,
    kind: RecordKind | None,
    *,
    alive: bool = True,
    closed: bool = False,
    state: str | None = None,
    attempt: int | None = None,
    device: RecordKind | None = None,
) -> RankLiveness:
    heartbeat_ns = NOW_NS - int(silent_s * 1e9)
    span = None if kind is None else CurrentSpan(kind=int(kind), step=7, microbatch=0, start_ns=heartbeat_ns)
    return RankLiveness(
        attempt=attempt,
        rank=rank,
        alive=alive,
        closed=closed,
        heartbeat_ns=heartbeat_ns,
        now_ns=NOW_NS,
        open_span=span,
        device_span=None if device is None else CurrentSpan(kind=int(device), step=7, microbatch=0, start_ns=NOW_NS),
        process_state=state,
    )


def test_the_rank_inside_compute_is_the_culprit_and_its_peers_are_victims() -> None:
    ranks = [_rank(0, 15, RecordKind.RECV_WAIT), _rank(1, 14, RecordKind.FORWARD), _rank(2, 15, RecordKind.GRAD_REDUCE)]
    found = find(ranks, 0.5, SETTINGS)
    assert found is not None
    assert found.culprits == (1,)
    assert found.victims == (0, 2)
    assert found.certain


@pytest.mark.parametrize("kind", [None, RecordKind.FORWARD, RecordKind.BACKWARD, RecordKind.DATA, RecordKind.OPTIMIZER])
def test_everything_that_is_no_wait_makes_a_culprit(kind: RecordKind | None) -> None:
    found = find([_rank(0, 20, kind), _rank(1, 20, RecordKind.RECV_WAIT)], 0.5, SETTINGS)
    assert found is not None
    assert found.culprits == (0,)


@pytest.mark.parametrize("victim", [RecordKind.GRAD_REDUCE, RecordKind.STEP, None])
def test_the_device_that_hangs_is_the_culprit_where_all_hosts_are_ahead_in_a_wait(victim: RecordKind | None) -> None:
    ranks = [
        _rank(0, 20, RecordKind.GRAD_NORM, device=victim),
        _rank(1, 20, RecordKind.GRAD_NORM, device=RecordKind.BACKWARD),
        _rank(2, 20, RecordKind.GRAD_NORM, device=RecordKind.GRAD_NORM),
    ]
    found = find(ranks, 0.5, SETTINGS)
    assert found is not None
    assert (found.culprits, found.victims, found.certain) == ((1,), (0, 2), True)
    assert "device" in found.reason


def test_devices_inside_a_pass_may_wait_for_each_other() -> None:
    found = find([_rank(rank, 20, RecordKind.GRAD_NORM, device=RecordKind.FORWARD) for rank in (0, 1)], 0.5, SETTINGS)
    assert found is not None
    assert (found.culprits, found.certain) == ((0, 1), False)
    assert "tensor-parallel" in found.reason
    assert "others" not in found.reason


def test_a_device_inside_a_collective_waits_wherever_its_host_is() -> None:
    ranks = [
        _rank(0, 20, RecordKind.OPTIMIZER, device=RecordKind.GRAD_REDUCE),
        _rank(1, 20, RecordKind.FORWARD),  # never gets to the collective; its device has nothing to do
    ]
    found = find(ranks, 0.5, SETTINGS)
    assert found is not None
    assert (found.culprits, found.victims) == ((1,), (0,))
    assert "device" not in found.reason


def test_a_stopped_process_is_the_culprit_even_inside_a_wait() -> None:
    ranks = [
        _rank(0, 20, RecordKind.RECV_WAIT),
        _rank(1, 20, RecordKind.RECV_WAIT, state="T"),
        _rank(2, 20, RecordKind.FORWARD),
    ]
    found = find(ranks, 0.5, SETTINGS)
    assert found is not None
    assert found.culprits == (1,)


@pytest.mark.parametrize("usual_step_s", [None, 0.5, 5.0])
@pytest.mark.parametrize("kind", [None, RecordKind.CHECKPOINT, RecordKind.EVALUATE, RecordKind.RECV_WAIT])
def test_a_stopped_process_gets_no_time_for_pauses(kind: RecordKind | None, usual_step_s: float | None) -> None:
    found = find([_rank(0, 12, RecordKind.CHECKPOINT), _rank(1, 11, kind, state="T")], usual_step_s, SETTINGS)
    assert found is not None
    assert found.culprits == (1,)


def test_a_victim_that_fell_silent_first_is_not_blamed() -> None:
    """The victim passes the limit some ticks before its culprit does."""
    found = find([_rank(0, 10.2, RecordKind.RECV_WAIT), _rank(1, 9.6, RecordKind.BACKWARD)], 0.5, SETTINGS)
    assert found is not None
    assert found.culprits == (1,)


def test_where_all_wait_the_first_to_fall_silent_is_named_with_doubt() -> None:
    found = find(
        [_rank(0, 30, RecordKind.RECV_WAIT), _rank(1, 25, RecordKind.RECV_WAIT), _rank(2, 24, RecordKind.GRAD_REDUCE)],
        0.5,
        SETTINGS,
    )
    assert found is not None
    assert found.culprits == (0,)
    assert not found.certain


@pytest.mark.parametrize(
    ("ranks", "usual_step_s"),
    [
        ([_rank(0, 9, RecordKind.FORWARD), _rank(1, 9, RecordKind.RECV_WAIT)], 0.5),
        ([_rank(0, 40, RecordKind.FORWARD)], 5.0),
        ([_rank(0, 200, RecordKind.FORWARD)], None),
        ([_rank(0, 60, RecordKind.CHECKPOINT), _rank(1, 60, RecordKind.EVALUATE)], 0.5),
        ([_rank(0, 60, RecordKind.FORWARD, closed=True)], 0.5),
        ([_rank(0, 60, None, alive=False), _rank(1, 60, RecordKind.RECV_WAIT)], 0.5),
        ([], 0.5),
    ],
    ids=["patience", "slow steps", "start-up", "pauses", "ended", "a rank died", "no ranks"],
)
def test_no_hang(ranks: list[RankLiveness], usual_step_s: float | None) -> None:
    assert find(ranks, usual_step_s, SETTINGS) is None


def test_the_verdict_is_reported_once_and_cleared_when_the_rank_moves_again() -> None:
    detector = Detector(JobLayout.grid(pp=2), DetectorSettings(startup_s=5.0))
    hung = [_rank(0, 20, RecordKind.FORWARD), _rank(1, 20, RecordKind.RECV_WAIT)]
    (verdict,) = detector.observe_liveness(NOW_NS, hung)
    assert verdict.cause is Cause.HANG
    assert verdict.subject.ranks == (0,)
    assert "Rank 1 only wait" in verdict.sentence
    assert detector.observe_liveness(NOW_NS, hung) == []
    (over,) = detector.observe_liveness(NOW_NS, [_rank(0, 0.1, RecordKind.FORWARD), _rank(1, 0.1, None)])
    assert over.id == verdict.id
    assert over.state is VerdictState.CLEARED
    assert over.until is not None


def test_ranks_of_a_new_attempt_are_starting_whatever_the_previous_attempt_did(sim: ModuleType) -> None:
    """The steps before a gang restart say nothing about how long ranks take to start."""
    layout = JobLayout.grid(pp=2)
    detector = Detector(layout)
    for view in sim.Simulator(sim.Job(layout=layout), 1).steps(0, 20):
        detector.observe(view)
    silent = [_rank(0, 60, None, attempt=0), _rank(1, 60, RecordKind.RECV_WAIT, attempt=0)]
    (found,) = detector.observe_liveness(NOW_NS, silent)
    assert (found.subject.ranks, found.since.attempt) == ((0,), 0)
    (over,) = detector.observe_liveness(NOW_NS, [dataclasses.replace(liveness, attempt=1) for liveness in silent])
    assert over.state is VerdictState.CLEARED
    stopped = [_rank(0, 60, None, attempt=1, state="T"), _rank(1, 60, None, attempt=1)]
    (again,) = detector.observe_liveness(NOW_NS, stopped)
    assert (again.since.attempt, again.since.step) == (1, 0)


def test_ranks_that_all_wait_are_named_only_if_that_lasts() -> None:
    """Continue a stopped rank: for a moment the last events of its victims are old."""
    detector = Detector(JobLayout.grid(pp=2), DetectorSettings(startup_s=5.0))
    stopped = [_rank(0, 12, RecordKind.RECV_WAIT), _rank(1, 12, RecordKind.RECV_WAIT, state="T")]
    (verdict,) = detector.observe_liveness(NOW_NS, stopped)
    assert verdict.subject.ranks == (1,)
    waiting = [_rank(0, 12, RecordKind.RECV_WAIT), _rank(1, 12, RecordKind.RECV_WAIT)]
    assert [verdict.state for verdict in detector.observe_liveness(NOW_NS + 500_000_000, waiting)] == [
        VerdictState.CLEARED
    ]
    assert detector.observe_liveness(NOW_NS + 3_000_000_000, waiting) == []
    named = detector.observe_liveness(NOW_NS + 4_000_000_000, waiting)
    assert [verdict.subject.ranks for verdict in named] == [(0,), (1,)]
