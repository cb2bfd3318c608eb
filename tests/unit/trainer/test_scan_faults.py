"""Faults: which act when, and how much time they add."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.errors import DocumentError
from megatronapp_common.trace import RecordKind
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.scan.commands import CommandReader
from megatronapp_trainer.scan.faults import HISTORY, FaultPlan, InjectedFault, commanded_faults

MS = 1_000_000


def fault(kind: str = "compute", *, rank: int = 0, factor: float = 3.0, peer: int | None = None) -> InjectedFault:
    return InjectedFault(rank=rank, kind=kind, factor=factor, from_step=10, steps=5, peer=peer)


def plan_with(injected: InjectedFault, *, step: int = 10, usual_ns: int = 4 * MS) -> FaultPlan:
    plan = FaultPlan(0, [injected])
    for _ in range(HISTORY):
        plan.observe(RecordKind.FORWARD, usual_ns)
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


def test_a_link_fault_delays_only_its_source() -> None:
    plan = plan_with(fault("link", peer=2))
    assert plan.withhold_ns(2) == 8 * MS
    assert plan.withhold_ns(3) == 0


def test_usual_is_the_median_of_the_last_spans() -> None:
    plan = plan_with(fault())
    assert plan.usual_ns(RecordKind.FORWARD) == 4 * MS
    assert plan.usual_ns(RecordKind.BACKWARD) == 0
    plan.observe(RecordKind.FORWARD, 100 * MS)
    assert plan.usual_ns(RecordKind.FORWARD) == 4 * MS
    for _ in range(HISTORY):
        plan.observe(RecordKind.FORWARD, 6 * MS)
    assert plan.usual_ns(RecordKind.FORWARD) == 6 * MS


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
        pytest.param({"rank": 1e999, "kind": "host", "factor": 2, "fromStep": 0, "steps": 1}, id="infinite-rank"),
        pytest.param({"rank": 0, "kind": "host", "factor": 1e999, "fromStep": 0, "steps": 1}, id="infinite"),
        pytest.param({"rank": 0, "kind": "host", "factor": 101, "fromStep": 0, "steps": 1}, id="large"),
        pytest.param({"rank": 0, "kind": "host", "factor": 2, "fromStep": 0, "steps": 0}, id="no-steps"),
        pytest.param({"rank": 0, "kind": "host", "factor": 2, "fromStep": -1, "steps": 1}, id="early"),
        pytest.param({"rank": 0, "kind": "link", "factor": 2, "fromStep": 0, "steps": 1, "peer": [1]}, id="peer"),
        pytest.param(1, id="number"),
        pytest.param([["rank", 0]], id="list"),
        pytest.param(None, id="null"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(document: object) -> None:
    with pytest.raises(UsageError, match="fault"):
        InjectedFault.from_json(document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(("rank", "kind", "factor", "fromStep", "steps", "peer"))


@given(st.fixed_dictionaries({"faults": JSON | st.lists(st.dictionaries(FIELDS, JSON), max_size=2)}))
def test_a_garbled_page_is_faults_or_a_refusal(page: dict[str, object]) -> None:
    try:
        faults = commanded_faults(page)
    except UsageError:
        return
    assert all(1 <= fault.factor <= 100 and fault.steps >= 1 for fault in faults)


class Pages:
    """A control page that shows one thing after the other."""

    def __init__(self, *shown: Any) -> None:
        self._shown = list(shown)

    def read_new(self) -> Any:
        document = self._shown.pop(0)
        if isinstance(document, Exception):
            raise document
        return document


def test_a_page_that_cannot_be_read_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    good = {"faults": [{"rank": 0, "kind": "compute", "factor": 3, "fromStep": 0, "steps": 9}]}
    plan = FaultPlan(0, [])
    pages: Any = Pages(good, {"faults": [1]}, {"faults": 7}, DocumentError("torn"), DocumentError("torn"), None)
    commands = CommandReader(pages, [lambda page: plan.command(commanded_faults(page))])
    for step in range(6):
        commands.read()
        plan.begin_step(step)
        assert plan.compute_stall_ns(MS) == 2 * MS
    assert caplog.text.count("a part of the control page is ignored") == 2
    assert (
        caplog.text.count("] the control page is ignored") + caplog.text.count(" the control page is ignored: torn")
        == 1
    )


def test_an_invalid_part_of_a_page_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    plan, taken = FaultPlan(0, []), list[Any]()
    pages: Any = Pages({"faults": 7, "windows": 1}, {"faults": [], "windows": 2}, {"faults": 7, "windows": 3})
    commands = CommandReader(
        pages, [lambda page: plan.command(commanded_faults(page)), lambda page: taken.append(page["windows"])]
    )
    for _ in range(3):
        commands.read()
    assert taken == [1, 2, 3]
    assert caplog.text.count("a part of the control page is ignored") == 2, "again after a valid page"
