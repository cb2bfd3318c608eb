"""Data frames of `megatronapp.client`, and the plugin of kubectl."""

import sys
import types
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp.client import Hub, HubError, OperatorError
from megatronapp.client.frames import history_frame, rows_frame, series_frame, timeline_frame
from megatronapp_common import cli
from megatronapp_operator.cli import cluster
from megatronapp_operator.cli.wait import WaitCondition

Capture = pytest.CaptureFixture[str]
ABSENT = st.none() | st.integers(0, 1 << 62)
SPAN = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 1 << 20),
        "kind": st.sampled_from([1, 2]),
        "chunk": st.integers(0, 255),
        "microbatch": ABSENT,
        "startNs": st.integers(0, 1 << 50),
        "durationNs": st.integers(0, 1 << 50),
        "flags": st.integers(0, 255),
        "runQueueNs": ABSENT,
        "bytes": ABSENT,
        "peer": ABSENT,
    }
)


def timeline(spans: list[dict[str, Any]]) -> dict[str, Any]:
    columns = {key: [span[key] for span in spans] for key in ("rank", "kind", "chunk", "microbatch", "startNs")}
    columns |= {key: [span[key] for span in spans] for key in ("durationNs", "flags", "runQueueNs", "bytes", "peer")}
    names = {"1": "forward", "2": "backward"}
    return columns | {"attempt": 3, "step": 7, "originNs": 1_800_000_000_000_000_000, "kindNames": names}


@given(spans=st.lists(SPAN, max_size=6))
def test_a_frame_has_each_span_exactly(spans: list[dict[str, Any]]) -> None:
    """Also where values are absent: integers stay integers of 64 bits."""
    document = timeline(spans)
    frame = timeline_frame(document)
    assert len(frame) == len(spans)
    for row, span in zip(frame.itertuples(), spans, strict=True):
        assert (row.attempt, row.step, row.rank, row.kind) == (
            3,
            7,
            span["rank"],
            ["forward", "backward"][span["kind"] - 1],
        )
        assert row.start_ns == document["originNs"] + span["startNs"]
        assert (row.chunk, row.duration_ns, row.flags) == (span["chunk"], span["durationNs"], span["flags"])
        for name, key in (
            ("microbatch", "microbatch"),
            ("run_queue_ns", "runQueueNs"),
            ("bytes", "bytes"),
            ("peer", "peer"),
        ):
            value = getattr(row, name)
            assert (value is not None and value == span[key]) if span[key] is not None else str(value) == "<NA>"


def test_hours_that_are_stored_are_times_and_integers() -> None:
    hour = {"hour": "2026-11-28T23", "attempt": 1, "firstStep": None, "lastStep": None, "records": 2**40, "bytes": 5}
    frame = history_frame({"hours": [hour, hour | {"firstStep": 3, "lastStep": 7}]})
    assert [str(value) for value in frame.first_step] == ["<NA>", "3"]
    assert frame.records.tolist() == [2**40, 2**40]
    assert frame.hour[0].isoformat() == "2026-11-28T23:00:00+00:00"
    assert list(history_frame({"hours": []})) == ["hour", "attempt", "first_step", "last_step", "records", "bytes"]
    with pytest.raises(HubError, match="history cannot be read"):
        history_frame({"hours": [{"hour": "x"}]})


def test_frames_without_rows_have_the_same_types() -> None:
    frame = timeline_frame(timeline([]))
    assert [str(frame[name].dtype) for name in ("start_ns", "duration_ns", "bytes")] == ["int64", "int64", "Int64"]
    steps = rows_frame([], {"step": "step", "complete": "complete"})
    assert [str(kind) for kind in steps.dtypes] == ["int64", "bool"]


def test_a_kind_of_a_later_release_has_its_number() -> None:
    document = timeline([]) | {key: [1] for key in ("rank", "chunk", "startNs", "durationNs", "flags")}
    document |= {key: [None] for key in ("microbatch", "runQueueNs", "bytes", "peer")} | {"kind": [99]}
    assert timeline_frame(document).kind.tolist() == ["99"]


def test_a_frame_has_a_note_of_what_it_lacks() -> None:
    assert timeline_frame(timeline([]) | {"omitted": None}).attrs == {"omitted": None}
    with pytest.warns(UserWarning, match="^the timeline is incomplete: the first 8 MiB$"):
        frame = timeline_frame(timeline([]) | {"omitted": "the first 8 MiB"})
    assert frame.attrs == {"omitted": "the first 8 MiB"}


def test_points_that_are_not_finite_are_absent() -> None:
    frame = series_frame({"attempts": [0, 0], "steps": [1, 2], "values": [None, 2.5]})
    assert frame.value.isna().tolist() == [True, False]
    assert frame.value.dtype == "float64"


@pytest.mark.parametrize("document", [{}, [], None, timeline([]) | {"kindNames": None}, timeline([]) | {"rank": [1]}])
def test_a_document_of_another_shape_is_an_error(document: Any) -> None:
    with pytest.raises(HubError, match="timeline cannot be read"):
        timeline_frame(document)


def test_pandas_is_needed_for_frames_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    hub = hub_of(lambda path, query: httpx.Response(200, json=[]))
    assert hub.get("verdicts") == []
    with pytest.raises(OperatorError, match=r"pip install 'megatronapp-operator\[client\]'"):
        hub.steps()


def hub_of(send: Callable[[str, Any], httpx.Response]) -> Hub:
    return Hub(send, address="http://127.0.0.1:1", token="t")


def test_queries_omit_what_is_absent_and_answers_are_checked() -> None:
    sent = []

    def send(path: str, query: dict[str, str]) -> httpx.Response:
        sent.append((path, query))
        return httpx.Response(200, text="<html>")

    hub = hub_of(send)
    with pytest.raises(HubError, match="the answer is not JSON"):
        hub.get("/steps", from_=3, to=None, whole=True)
    assert sent == [("steps", {"from": "3", "whole": "true"})]
    refusing = hub_of(
        lambda path, query: httpx.Response(404, json={"message": "no \x1b[2J step", "hint": "Take newer."})
    )
    with pytest.raises(HubError, match=r"^no \ufffd\[2J step; take newer\.$"):
        refusing.get("steps")


def test_the_plugin_of_kubectl_selects_the_cluster(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv(cluster.CONTEXT_VARIABLE, raising=False)
    assert cli.kubectl_plugin(["get"]) == 1
    assert "no cluster: /nonexistent does not exist" in capsys.readouterr().err
    assert cli.kubectl_plugin(["get", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: kubectl megatron get ")


@pytest.mark.parametrize(("phase", "has_run"), [("Succeeded", True), ("Failed", False)])
def test_a_job_that_has_succeeded_was_running(phase: str, has_run: bool) -> None:
    """A short one may run between two polls of a client."""
    status = {"conditions": [{"type": "Running", "status": "False"}]}
    job = types.SimpleNamespace(name="short", phase=phase, status=status, document={}, ended=True)
    assert WaitCondition("Running").holds(job) is has_run
    assert WaitCondition("Running", "False").holds(job)
