import json
from pathlib import Path
from typing import Any

import pytest

from megatronapp_analyzer.errors import ProtocolError, SettingsError
from megatronapp_analyzer.hub.settings import check_bind, load_job_file
from megatronapp_analyzer.hub.state import ranks
from megatronapp_analyzer.hub.state.faults import Fault, FaultRequest, FaultStore
from megatronapp_analyzer.hub.state.progress import Progress
from megatronapp_analyzer.hub.state.verdicts import MAX_VERDICTS, VerdictStore
from megatronapp_analyzer.hub.state.windows import (
    MAX_WINDOWS,
    SUSPECT_INTERVAL_S,
    SuspectWindows,
    WindowRequest,
    WindowStore,
    first_step,
)
from megatronapp_analyzer.model import Cause, JobMoment, SubjectType, Verdict, VerdictState, VerdictSubject
from megatronapp_common.trace import RecordKind

S = 1_000_000_000


def status(**changes: Any) -> ranks.RankStatus:
    entry = {
        "rank": 0,
        "heartbeatNs": 100 * S,
        "nowNs": 100 * S,
        "openSpan": None,
        "lost": 0,
        "closed": False,
        "alive": True,
        "processState": "S",
    }
    return ranks.parse_status(entry | changes, 50 * S)


@pytest.mark.parametrize(
    ("changes", "now_s", "usual_step_s", "hung", "expected"),
    [
        ({}, 50, 1.0, (), "training"),
        ({}, 54, 1.0, (), "training"),
        ({}, 56, 1.0, (), "silent"),
        ({"heartbeatNs": 91 * S}, 50, 1.0, (), "silent"),
        ({"heartbeatNs": 91 * S}, 50, 2.0, (), "training"),
        ({"heartbeatNs": 50 * S}, 50, None, (), "training"),
        ({"heartbeatNs": 50 * S}, 50, 1.0, (0,), "hung"),
        ({"closed": True}, 50, 1.0, (0,), "ended"),
        ({"alive": False}, 90, 1.0, (), "ended"),
    ],
)
def test_rank_state(
    changes: dict[str, Any], now_s: int, usual_step_s: float | None, hung: tuple[int, ...], expected: str
) -> None:
    state = ranks.rank_state(status(**changes), now_ns=now_s * S, usual_step_s=usual_step_s, hung=hung)
    assert state == expected


def test_a_rank_without_any_report_is_silent() -> None:
    assert ranks.rank_state(None, now_ns=0, usual_step_s=None, hung=()) == "silent"


def test_the_span_of_the_device_is_read() -> None:
    span = {"kind": int(RecordKind.BACKWARD), "step": 4, "microbatch": 1, "startNs": 0}
    found = status(deviceSpan=span).liveness.device_span
    assert found is not None
    assert (found.kind, found.step, found.microbatch) == (RecordKind.BACKWARD, 4, 1)
    assert status().liveness.device_span is None


def test_open_span_is_read() -> None:
    span = {"kind": int(RecordKind.RECV_WAIT), "step": 4, "microbatch": None, "startNs": 98 * S}
    found = status(openSpan=span)
    assert found.open_span_age_s == 2.0
    assert found.liveness.open_span is not None
    assert found.liveness.open_span.microbatch == 0xFFFF


def test_unheard_agents_are_not_judged() -> None:
    statuses = {0: status(), 1: status(rank=1)}
    assert [entry.rank for entry in ranks.fresh(statuses, 52 * S)] == [0, 1]
    assert ranks.fresh(statuses, 60 * S) == []


def test_evaluation_is_no_hang() -> None:
    inside = status(openSpan={"kind": int(RecordKind.RECV_WAIT), "step": 4, "microbatch": 1, "startNs": 0}).liveness
    quiet = status(rank=1).liveness
    assert ranks.in_pause([inside, quiet], "training") == [inside, quiet]
    assert ranks.in_pause([inside, quiet], None) == [inside, quiet]
    same, paused = ranks.in_pause([inside, quiet], "evaluating")
    assert same == inside
    assert paused.open_span is not None
    assert paused.open_span.kind == RecordKind.EVALUATE


@pytest.mark.parametrize("rings", [None, {}, [1], [{"heartbeatNs": 1}]])
def test_garbled_status_is_refused(rings: Any) -> None:
    with pytest.raises(ProtocolError, match="rings"):
        ranks.parse_agent_status({"rings": rings}, 0)


def test_the_workers_own_ring_is_no_rank() -> None:
    entry = {"rank": None, "heartbeatNs": 0, "nowNs": 0, "openSpan": None, "lost": 0, "closed": False, "alive": True}
    assert ranks.parse_agent_status({"rings": [entry], "progress": None}, 0).ranks == []
    with pytest.raises(ProtocolError, match="progress"):
        ranks.parse_agent_status({"rings": [], "progress": 3}, 0)
    with pytest.raises(ProtocolError, match="sharedMemory"):
        ranks.parse_agent_status({"rings": [], "sharedMemory": {"path": "/dev/shm"}}, 0)


@pytest.mark.parametrize("missing", ["heartbeatNs", "nowNs", "closed", "alive", "lost", "openSpan"])
def test_status_without_a_field_is_refused(missing: str) -> None:
    entry = {"rank": 0, "heartbeatNs": 0, "nowNs": 0, "openSpan": None, "lost": 0, "closed": False, "alive": True}
    del entry[missing]
    with pytest.raises(ProtocolError, match=missing):
        ranks.parse_status(entry, 0)


def test_kind_of_a_newer_release_has_a_name() -> None:
    assert ranks.kind_name(RecordKind.RECV_WAIT) == "recv_wait"
    assert ranks.kind_name(250) == "kind-250"


def test_faults_survive_and_their_version_grows(tmp_path: Path) -> None:
    manifest = Fault(id="manifest-0", rank=1, kind="host", factor=2, from_step=0, steps=1)
    store = FaultStore(tmp_path / "faults.json", [manifest])
    seen: list[int] = []
    store.on_change = lambda: seen.append(store.version)
    given = store.add(FaultRequest(rank=0, kind="link", factor=3, from_step=5, steps=2, peer=1))
    assert given is not None
    assert store.current() == [manifest, given]
    assert store.document()["faults"] == [given.model_dump()]
    assert given.model_dump()["fromStep"] == 5
    again = FaultStore(tmp_path / "faults.json", [manifest])
    assert again.current() == [manifest, given]
    assert again.version > store.version
    other = again.add(FaultRequest(rank=0, kind="host", factor=3, from_step=5, steps=2))
    assert other is not None and other.id != given.id
    assert again.remove(given.id)
    assert not again.remove(given.id)
    assert not again.remove("manifest-0")
    assert again.is_of_manifest("manifest-0")
    assert seen == [2]


def test_progress_that_is_no_number_is_null() -> None:
    page = json.loads('{"iteration": 3, "loss": NaN, "gradNorm": -Infinity, "updatedAt": "2026-11-21T10:33:16Z"}')
    found = Progress.model_validate(page)
    assert (found.loss, found.grad_norm, found.iteration) == (None, None, 3)
    assert "NaN" not in json.dumps(found.model_dump())


def verdict(
    id_: str, state: VerdictState = VerdictState.CONFIRMED, time: float = 1.0, cause: Cause = Cause.COMPUTE
) -> Verdict:
    return Verdict(
        id=id_,
        subject=VerdictSubject(type=SubjectType.RANK, ranks=(3,)),
        cause=cause,
        state=state,
        seconds_per_step=0.5,
        seconds_lost=0.5,
        slowdown=2.0,
        confidence=0.9,
        evidence_steps=(7, 8),
        evidence_text=(),
        since=JobMoment(attempt=0, step=5, time=time),
    )


def test_windows_leave_the_page_when_their_steps_are_over(tmp_path: Path) -> None:
    store = WindowStore(tmp_path / "windows.json")
    for number in range(MAX_WINDOWS):
        assert store.add(WindowRequest(steps=2), from_step=10 + number, newest_step=5) is not None
    assert store.add(WindowRequest(steps=2), from_step=40, newest_step=10) is None
    again = WindowStore(tmp_path / "windows.json")
    added = again.add(WindowRequest(steps=2, ranks=[1], granularity="base"), from_step=40, newest_step=11)
    assert added is not None and added.id == f"window-{MAX_WINDOWS + 1}"
    assert again.entries()[-1] == {"fromStep": 40, "steps": 2, "granularity": "base", "ranks": [1]}
    assert [window.from_step for window in again.current(12)] == [12, 13, 40]


def test_a_cancelled_window_is_in_no_document_and_its_place_is_free(tmp_path: Any) -> None:
    store, changes = WindowStore(tmp_path / "windows.json"), list[int]()
    store.on_change = lambda: changes.append(len(store.entries()))
    ids = []
    for number in range(MAX_WINDOWS):
        window = store.add(WindowRequest(steps=2), from_step=10 + number, newest_step=5)
        assert window is not None
        ids.append(window.id)
    assert store.cancel(ids[1], earliest=11)
    assert not store.cancel(ids[1], earliest=11)
    assert not store.cancel("window-99", earliest=11)
    assert changes == [1, 2, 3, 4, 3]
    assert [window.id for window in WindowStore(tmp_path / "windows.json").current(5)] == [ids[0], *ids[2:]]
    added = store.add(WindowRequest(steps=2), from_step=40, newest_step=5)
    assert added is not None and added.id not in ids


def test_a_cancelled_window_that_has_begun_ends_when_all_ranks_can_know_of_it(tmp_path: Any) -> None:
    store = WindowStore(tmp_path / "windows.json")
    window = store.add(WindowRequest(steps=100), from_step=10, newest_step=5)
    assert window is not None
    assert store.cancel(window.id, earliest=25)
    assert store.cancel(window.id, earliest=30), "it ends no later for being cancelled again"
    (left,) = WindowStore(tmp_path / "windows.json").current(20)
    assert (left.from_step, left.last_step) == (10, 24)
    assert store.current(24) == []


def test_a_window_begins_when_all_ranks_can_know_of_it() -> None:
    assert first_step(None, None) == 5
    assert first_step(100, 10.0) == 105
    assert first_step(100, 0.02) == 200


def test_a_new_verdict_brings_a_window_of_its_ranks_now_and_then() -> None:
    now = [0.0]
    store = WindowStore(None)
    windows = SuspectWindows(store, lambda: now[0])
    verdicts = VerdictStore(None)
    ordered: list[Any] = []
    verdicts.on_new = lambda found: ordered.append(windows.order(found, newest_step=20, step_s=1.0, has_layers=True))
    verdicts.update([verdict("hung", cause=Cause.HANG), verdict("a")])
    verdicts.update([verdict("a", time=2.0), verdict("b")])
    now[0] = SUSPECT_INTERVAL_S
    verdicts.update([verdict("c")])
    assert [window and (window.reason, window.ranks, window.from_step) for window in ordered] == [
        None,
        ("a", [3], 25),
        None,
        ("c", [3], 25),
    ]


def test_verdicts_newest_first_and_versions() -> None:
    store = VerdictStore(None)
    assert store.update([verdict("a", time=1.0), verdict("b", time=2.0, cause=Cause.HANG)])
    assert not store.update([verdict("a", time=1.0)])
    assert store.version == 1
    assert [entry["id"] for entry in store.all()] == ["b", "a"]
    assert store.hung_ranks() == [3]
    store.update([verdict("b", VerdictState.CLEARED, time=2.0, cause=Cause.HANG)])
    assert store.hung_ranks() == []
    assert [entry.id for entry in store.active()] == ["a"]


def test_verdicts_not_repeated_after_a_restart_are_cleared(tmp_path: Path) -> None:
    VerdictStore(tmp_path / "v.json").update([verdict("a"), verdict("b")])
    store = VerdictStore(tmp_path / "v.json")
    store.update([verdict("a")])
    store.clear_unreported(9.0)
    by_id = {entry["id"]: entry for entry in VerdictStore(tmp_path / "v.json").all()}
    assert by_id["a"]["state"] == "confirmed"
    assert by_id["b"]["state"] == "cleared"
    assert by_id["b"]["until"] == {"attempt": 0, "step": 8, "time": 9.0}
    store.clear_all(10.0)
    assert {entry["state"] for entry in store.all()} == {"cleared"}
    assert store.active() == []


def test_old_cleared_verdicts_are_forgotten() -> None:
    store = VerdictStore(None)
    store.update([verdict("first", time=0.0)])
    store.update(verdict(str(n), VerdictState.CLEARED, time=float(n + 1)) for n in range(2 * MAX_VERDICTS))
    ids = [entry["id"] for entry in store.all()]
    assert len(ids) <= MAX_VERDICTS + 1
    assert "first" in ids


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_needs_no_permission(host: str) -> None:
    check_bind(host, allow_remote=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_other_addresses_need_permission(host: str) -> None:
    with pytest.raises(SettingsError, match="--allow-remote"):
        check_bind(host, allow_remote=False)
    check_bind(host, allow_remote=True)


def test_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "metadata: {name: demo, namespace: team}\n"
        "spec: {nodes: 2, faults: [{rank: 1, kind: host, factor: 2, fromStep: 5, steps: 3}]}\n"
    )
    job = load_job_file(path, name=None, uid="u")
    assert (job.name, job.namespace, job.uid) == ("demo", "team", "u")
    assert len(job.spec_digest) == 16
    assert [(fault.id, fault.rank, fault.from_step) for fault in job.faults] == [("manifest-0", 1, 5)]
    path.write_text("metadata: {name: demo}\nspec: {faults: [{rank: -1}]}\n")
    with pytest.raises(SettingsError, match=r"spec.faults\[0\]"):
        load_job_file(path, name=None, uid=None)
    for text in ("[1, 2]", "a: [", "{}"):
        path.write_text(text)
        with pytest.raises(SettingsError, match=r"job\.yaml"):
            load_job_file(path, name=None, uid=None)
