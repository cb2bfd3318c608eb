"""Faults: which act when, and how much time they add."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.trace import Kind
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.scan.faults import HISTORY, Fault, FaultPlan

MS = 1_000_000


def fault(kind: str = "compute", *, rank: int = 0, factor: float = 3.0, peer: int | None = None) -> Fault:
    return Fault(rank=rank, kind=kind, factor=factor, from_step=10, steps=5, peer=peer)


def plan_with(one: Fault, *, step: int = 10, usual_ns: int = 4 * MS) -> FaultPlan:
    plan = FaultPlan(0, [one])
    for _ in range(HISTORY):
        plan.observe(Kind.FORWARD, usual_ns)
    plan.begin_step(step)
    return plan


@given(step=st.integers(0, 30))
def test_acts_exactly_in_its_steps(step: int) -> None:
    plan = plan_with(fault(), step=step)
    assert (plan.compute_stall_ns(MS) > 0) == (10 <= step < 15)


@given(own_ns=st.integers(0, 10**10), factor=st.floats(1, 50))
def test_compute_lasts_factor_times_as_long(own_ns: int, factor: float) -> None:
    plan = plan_with(fault(factor=factor))
    assert own_ns + plan.compute_stall_ns(own_ns) == pytest.approx(factor * own_ns, abs=1)


def test_other_ranks_feel_nothing() -> None:
    plan = plan_with(fault(rank=1))
    assert plan.compute_stall_ns(MS) == plan.host_stall_ns() == plan.withhold_ns(1) == 0


def test_host_and_link_count_in_usual_forward_times() -> None:
    assert plan_with(fault("host")).host_stall_ns() == 8 * MS
    assert plan_with(fault("link")).withhold_ns(7) == 8 * MS


def test_link_can_be_one_source_only() -> None:
    plan = plan_with(fault("link", peer=2))
    assert plan.withhold_ns(2) == 8 * MS
    assert plan.withhold_ns(3) == 0


def test_usual_is_the_median_of_the_last_spans() -> None:
    plan = plan_with(fault())
    assert plan.usual_ns(Kind.FORWARD) == 4 * MS
    assert plan.usual_ns(Kind.BACKWARD) == 0
    plan.observe(Kind.FORWARD, 100 * MS)
    assert plan.usual_ns(Kind.FORWARD) == 4 * MS
    for _ in range(HISTORY):
        plan.observe(Kind.FORWARD, 6 * MS)
    assert plan.usual_ns(Kind.FORWARD) == 6 * MS


def test_commands_add_to_the_manifest_and_can_be_taken_back() -> None:
    plan = plan_with(fault(factor=2))
    plan.command([fault(factor=3)])
    plan.begin_step(11)
    assert plan.compute_stall_ns(MS) == 3 * MS
    plan.command([])
    plan.begin_step(12)
    assert plan.compute_stall_ns(MS) == MS


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({}, id="empty"),
        pytest.param({"rank": 0, "kind": "fire", "factor": 2, "fromStep": 0, "steps": 1}, id="kind"),
        pytest.param({"rank": 0, "kind": "host", "factor": 0.5, "fromStep": 0, "steps": 1}, id="factor"),
        pytest.param({"rank": 0, "kind": "host", "factor": "nan", "fromStep": 0, "steps": 1}, id="nan"),
        pytest.param({"rank": "x", "kind": "host", "factor": 2, "fromStep": 0, "steps": 1}, id="rank"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="fault"):
        Fault.from_json(document)
