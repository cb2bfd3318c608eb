"""Documents of a job for users and programs."""

import argparse
import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from megatronapp_common.job import FbdRanks, read_status, status_document
from megatronapp_common.job.api.analyzer import SlowNodeCost, SlowRank
from megatronapp_common.job.api.progress import ForwardBackward, PipelinePlan, ShipModeCost
from megatronapp_common.text.times import rfc3339, seconds_of
from megatronapp_common.topology import fbd_world_of
from megatronapp_operator.backends.process.state.registry import JobView, lost_status
from megatronapp_operator.cli.describe import describe
from megatronapp_operator.cli.text.durations import human_duration, parse_duration
from megatronapp_operator.cli.text.tables import COLUMNS, WIDE_COLUMNS, Table, format_table, job_row
from megatronapp_operator.cli.wait import WaitCondition, parse_condition
from megatronapp_operator.errors import OperatorError
from megatronapp_operator.plan import (
    Condition,
    ConditionType,
    Failure,
    FailureAction,
    Phase,
    Progress,
    Replicas,
    Status,
)

STORED = TypeAdapter(Status)
SLOW = SlowRank(
    gpu_hours=12.25,
    cost=30.6,
    id="v1",
    subject="link",
    ranks=(0, 2),
    cause="link",
    state="confirmed",
    sentence="Slow.",
    since_step=7,
    slowdown=1.5,
)
FULL = Status(
    phase=Phase.RUNNING,
    conditions=(
        Condition(
            type=ConditionType.RUNNING,
            status=True,
            reason="Yes",
            message="it runs",
            since=1_700_000_000.5,
            generation=1,
        ),
    ),
    generation=1,
    attempt=2,
    restarts=2,
    restarts_towards_max=1,
    start_time=1_700_000_000.0,
    attempt_time=1_700_000_001.0,
    running_time=1_700_000_002.0,
    last_restart_time=1_700_000_000.0,
    progress=Progress(
        attempt=2,
        iteration=5,
        total_iterations=10,
        loss=1.25,
        tokens_per_second=1234.5,
        plans=(PipelinePlan(from_step=0, schedule="auto", plan="order of megatron-core", simulated_seconds=0.5),),
        forward_backward=ForwardBackward(
            from_step=5,
            ship="selective",
            chosen=True,
            backward_per_forward=2,
            ship_bytes=3 << 20,
            forward_seconds=0.0125,
            modes=(ShipModeCost(ship="saved", ship_bytes=5 << 20, step_seconds=0.5),),
            advice="keep the ratio",
        ),
    ),
    slow_ranks=(SLOW,),
    slow_nodes=(
        SlowNodeCost(
            node="gpu-7", ranks=(2, 3), causes=("compute", "host"), since=1_700_000_000.0, gpu_hours=4.25, cost=10.6
        ),
    ),
    hung_ranks=(3,),
    last_control=1_763_000_000_000,
    replicas=Replicas(desired=2, running=2),
    failures=(
        Failure(
            time=1_700_000_000.0,
            attempt=1,
            reason="WorkerFailed",
            message="rank 3 on worker 1 failed\nwith more words",
            action=FailureAction.RESTART,
            worker=1,
            rank=3,
            exit_code=1,
        ),
    ),
)


def make_view(tmp_path: Any, status: dict[str, Any]) -> JobView:
    from megatronapp_operator.backends.process.state.paths import JobPaths

    document = {
        "metadata": {"name": "demo", "uid": "u1", "creationTimestamp": "2023-11-14T22:13:20Z"},
        "spec": {"parallelism": {"tensor": 1, "pipeline": 2}},
        "status": status,
    }
    return JobView(paths=JobPaths(tmp_path / "demo"), document=document, alive=True)


@pytest.mark.parametrize("status", [Status(), FULL], ids=["new", "full"])
def test_the_status_is_what_the_api_types_accept(status: Status) -> None:
    document = status_document(status)
    read = STORED.validate_json(json.dumps(document))
    assert read.phase == status.phase
    assert read.attempt == status.attempt
    assert status_document(read)["replicaStatuses"]["running"] == status.replicas.running


def test_every_field_of_the_full_status_is_shown() -> None:
    document = status_document(FULL)
    assert document["progress"] == {
        "attempt": 2,
        "iteration": 5,
        "totalIterations": 10,
        "loss": 1.25,
        "tokensPerSecond": 1234.5,
        "state": "training",
        "plans": [
            {
                "fromStep": 0,
                "schedule": "auto",
                "plan": "order of megatron-core",
                "microbatches": 0,
                "chunks": 1,
                "capChunks": 0,
                "spareChunks": 0,
                "chosen": False,
                "simulatedSeconds": 0.5,
            }
        ],
        "forwardBackward": {
            "fromStep": 5,
            "ship": "selective",
            "chosen": True,
            "merged": False,
            "backwardPerForward": 2,
            "shipBytes": 3 << 20,
            "forwardSeconds": 0.0125,
            "modes": [{"ship": "saved", "shipBytes": 5 << 20, "stepSeconds": 0.5}],
            "advice": "keep the ratio",
        },
    }
    assert not {"plans", "forwardBackward"} & set(status_document(Status(progress=Progress(iteration=1)))["progress"])
    assert document["replicaStatuses"] == {
        "desired": 2,
        "pending": 0,
        "running": 2,
        "succeeded": 0,
        "failed": 0,
        "ready": 2,
    }
    assert document["conditions"][0]["lastTransitionTime"] == "2023-11-14T22:13:20Z"
    assert document["slowRanks"][0]["subject"] == {"type": "link", "ranks": [0, 2]}
    assert document["failures"][0]["exitCode"] == 1
    assert document["hungRanks"] == [3]
    assert document["lastControl"] == 1_763_000_000_000


def test_no_worker_is_ready_before_its_attempt_makes_progress() -> None:
    before = dataclasses.replace(FULL, attempt=3)
    assert "ready" not in status_document(before)["replicaStatuses"]
    starting = dataclasses.replace(FULL, progress=Progress(attempt=2, iteration=0, state="starting"))
    assert "ready" not in status_document(starting)["replicaStatuses"]


@given(st.integers(0, 4_000_000_000))
def test_times_survive_formatting_and_parsing(seconds: int) -> None:
    assert seconds_of(rfc3339(seconds) or "") == seconds


def test_a_lost_backend_fails_the_job_and_keeps_its_history() -> None:
    document = status_document(FULL) | {"hubUrl": "http://127.0.0.1:1"}
    lost = lost_status(document, now=1_700_000_100)
    assert lost["phase"] == "Failed"
    assert "hubUrl" not in lost
    assert lost["restarts"] == 2
    assert lost["replicaStatuses"]["running"] == 0
    conditions = {condition["type"]: condition for condition in lost["conditions"]}
    assert conditions["Running"]["status"] == "False"
    assert conditions["Failed"]["reason"] == "BackendLost"
    STORED.validate_json(json.dumps(lost))


def test_a_lost_backend_that_wrote_nothing_is_a_failed_job_too() -> None:
    assert lost_status({}, now=0)["phase"] == "Failed"


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("1h30m", 5400), ("500ms", 0.5), ("-1s", -1), ("12", 12), ("0.5", 0.5)]
)
def test_durations_are_read_as_kubectl_reads_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "3 s", "1d", "s", "--1s"])
def test_other_durations_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write it as 30s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"),
        (119, "119s"),
        (120, "2m"),
        (125, "2m5s"),
        (600, "10m"),
        (10_799, "179m"),
        (10_800, "3h"),
        (12_000, "3h20m"),
        (100_000, "27h"),
        (200_000, "2d7h"),
        (864_000, "10d"),
        (80_000_000, "2y195d"),
    ],
)
def test_ages_are_written_as_kubectl_writes_them(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_tables_are_aligned_and_have_no_blanks_at_line_ends() -> None:
    assert format_table([["NAME", "AGE"], ["a-long-name", "3s"]]) == "NAME          AGE\na-long-name   3s\n"
    assert format_table([]) == ""


def test_rows_fit_their_headings(tmp_path: Any) -> None:
    view = make_view(tmp_path, status_document(FULL) | {"worldSize": 4, "hubUrl": "http://h"})
    row = job_row(view, wide=True)
    assert len(row) == len(WIDE_COLUMNS)
    assert row[:5] == ["demo", "Running", "2/2", "2", "5/10"]
    assert row[5] == "link-0-2"
    assert row[7:] == ["2", "4", "1.2500", "1234", "http://h"]
    assert len(job_row(view, wide=False)) == len(COLUMNS)
    assert job_row(make_view(tmp_path, {"phase": "Pending"}), wide=True)[4:6] == ["<none>", "<none>"]
    suspect = status_document(dataclasses.replace(FULL, slow_ranks=(dataclasses.replace(SLOW, state="suspect"),)))
    assert job_row(make_view(tmp_path, suspect), wide=False)[5] == "<none>"


def test_a_table_that_is_continued_has_the_same_columns() -> None:
    table = Table()
    assert table.format([["NAME", "AGE"], ["a-long-name", "3s"]]) == "NAME          AGE\na-long-name   3s\n"
    assert table.format([["b", "4s"]]) == "b             4s\n"
    assert table.format([["an-even-longer-name", "4s"]]) == "an-even-longer-name   4s\n"
    assert table.format([["b", "4s"]]) == "b                     4s\n"


def test_describe_shows_the_roles_of_ranks(tmp_path: Any) -> None:
    ranks = FbdRanks.of(fbd_world_of(3, tensor=1, pipeline=1, backward_per_forward=2))
    status = Status(world_size=3, data_parallel_size=2, fbd=ranks)
    worker = {"index": 0, "address": "127.0.0.2", "node": "node-0", "ranks": [0, 1, 2]}
    table = {"workers": [worker | {"roles": ["backward", "backward", "forward"]}]}
    document = status_document(status) | {"rankTable": table}
    assert document["fbd"] == {"forwardRanks": 1, "backwardRanks": 2, "backwardPerForward": 2}
    assert read_status(document).fbd == status.fbd
    text = "\n".join(describe(make_view(tmp_path, document)))
    assert "1 forward, 2 backward, data-parallel size 2, one forward rank for 2 replicas" in text
    assert re.search(r"RANKS +ROLES\n.* 0,1,2 +backward,backward,forward", text)


def test_describe_shows_state_failures_and_verdicts(tmp_path: Any) -> None:
    text = "\n".join(describe(make_view(tmp_path, status_document(FULL))))
    for text_part in (
        "Phase:",
        "Running",
        "tensor 1, pipeline 2",
        "RestartJob",
        "rank 3 on worker 1",
        "link 0,2",
        "12.25",
        "30.6",
        "auto: order of megatron-core",
        "ships what selective recomputation keeps, chosen by measured times (3.0 MiB a microbatch), 2 backward per",
        "forward 12.5 ms per microbatch",
        "keep the ratio",
        "Slow.",
    ):
        assert text_part in text
    assert "with more words" not in text, "a table has one line per failure"
    assert re.search(r"^Slow nodes:\n  NODE .*\n  gpu-7 +2,3 +compute,host +\S+ +4\.25 +10\.6$", text, re.MULTILINE)
    assert "Events:  <none>" in text


def test_describe_names_a_slow_node_of_which_only_the_name_is_known(tmp_path: Any) -> None:
    text = "\n".join(describe(make_view(tmp_path, {"slowNodes": [{"node": "gpu-7"}]})))
    assert re.search(r"^  gpu-7( +<none>){2} +<unknown>( +<none>){2}$", text, re.MULTILINE)
    assert "Slow nodes:  <none>" in "\n".join(describe(make_view(tmp_path, {})))


def test_a_condition_is_waited_for_by_type_and_status(tmp_path: Any) -> None:
    view = make_view(tmp_path, status_document(FULL))
    assert parse_condition("condition=Running").holds(view)
    assert parse_condition("condition=running=true").holds(view)
    assert not parse_condition("condition=Running=False").holds(view)
    assert not parse_condition("condition=Complete").holds(view)
    assert not WaitCondition("Complete").is_unreachable(view)
    ended = make_view(tmp_path, lost_status(status_document(FULL), now=0))
    assert WaitCondition("Complete").is_unreachable(ended)
    assert not WaitCondition("Failed").is_unreachable(ended)
    stopped = make_view(tmp_path, status_document(dataclasses.replace(FULL, phase=Phase.SUSPENDED)))
    assert WaitCondition("Complete").is_unreachable(stopped), "nothing on this machine takes it up by itself"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "condition=Completed",
            "'Completed' is not known; did you mean Complete? known: Created, ProfileApplied, Initialized, ",
        ),
        ("condition=Suceeded", "'Suceeded' is not known; did you mean Complete? "),
        ("condition=SlowNode", "did you mean SlowNodeDetected?"),
        ("condition=Running=no", "'no' is not known; known: True, False, Unknown"),
    ],
)
def test_a_condition_that_no_job_has_is_refused_with_all_that_there_are(text: str, message: str) -> None:
    with pytest.raises(OperatorError) as refused:
        parse_condition(text)
    assert message in str(refused.value)
    assert "Unknown" in str(refused.value) or "Complete, Failed" in str(refused.value)


@pytest.mark.parametrize("text", ["Complete", "condition=", "condition", "jsonpath={.x}=1"])
def test_other_things_to_wait_for_are_refused(text: str) -> None:
    with pytest.raises(OperatorError, match="write condition=Complete"):
        parse_condition(text)
