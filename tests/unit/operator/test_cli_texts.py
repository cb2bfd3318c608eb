"""Texts that others wrote into a status never move a terminal."""

import argparse
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common import cli
from megatronapp_common.job.api.profile import Profile, ProfileKind
from megatronapp_common.job.profiles.effective import load_layered_job
from megatronapp_common.text.terminal import replace_control_characters, to_single_line
from megatronapp_operator.cli import describe, get
from megatronapp_operator.cli.cluster.connection import ClusterJob
from megatronapp_operator.cli.text.tables import format_table, slow_subjects
from megatronapp_operator.cli.training import orders
from megatronapp_operator.errors import OperatorError

EVIL = "a\x1b]0;owned\x07b\x9b2Jc\rd\x08e\u202ef\ud800"
MOVES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
TIME = "2026-01-01T00:00:00Z"


def hostile_job() -> ClusterJob:
    """Every text that a hub, a launcher or a pod has a say in."""
    verdict = {
        "id": EVIL,
        "state": "confirmed",
        "cause": EVIL,
        "sentence": EVIL,
        "subject": {"type": EVIL, "ranks": [1]},
    }
    status: dict[str, Any] = {
        "phase": EVIL,
        "hubUrl": EVIL,
        "conditions": [
            {"type": EVIL, "status": EVIL, "reason": EVIL, "message": f"{EVIL}\n{EVIL}", "lastTransitionTime": TIME}
        ],
        "rankTable": {"workers": [{"index": 0, "node": EVIL, "address": EVIL, "ranks": [0]}]},
        "slowRanks": [verdict],
        "failures": [{"attempt": 0, "time": TIME, "action": EVIL, "reason": EVIL, "message": EVIL}],
    }
    metadata = {"name": "gpt", "namespace": EVIL, "uid": EVIL, "creationTimestamp": TIME}
    return ClusterJob({"metadata": metadata, "spec": {"parallelism": {}}, "status": status})


class FakeSource:
    def view(self, name: str) -> ClusterJob:
        return hostile_job()

    def views(self) -> list[ClusterJob]:
        return [hostile_job()]


def test_describe_writes_no_escape_sequence() -> None:
    event = {"type": EVIL, "reason": EVIL, "time": TIME, "message": EVIL}
    lines = list(describe.lines(hostile_job(), [event], place=[("Namespace", EVIL)]))
    assert not [line for line in lines if MOVES.search(line) or "\n" in line]
    assert sum("owned" in line for line in lines) > 8


def test_describe_shows_the_size_of_a_smaller_gang_and_what_it_lacks() -> None:
    spent = {"absent": 2, "absentSince": TIME, "absentSeconds": 7200.0, "absentGpuSeconds": 57600.0}
    status = {"timeSpent": spent, "gangSize": {"data": 2, "sinceAttempt": 3}}
    metadata = {"name": "gpt", "namespace": "team", "uid": "u", "creationTimestamp": TIME}
    job = ClusterJob({"metadata": metadata, "spec": {"parallelism": {"data": 4}}, "status": status})
    head = [re.sub(r" {2,}", " ", line) for line in describe.lines(job, [], place=[])]
    assert "Replicas: 2 of 4 since attempt 3" in head
    assert "Absent workers: 2, missed for 120m (16.00 GPU-hours)" in head


def test_describe_knows_the_fields_that_a_profile_gives() -> None:
    template = {"parallelism": {"data": 4}, "analyzer": {"gpuHourPrice": 2.5}}
    metadata = {"name": "gpt", "namespace": "team", "uid": "u", "creationTimestamp": TIME}
    own = {
        "nodes": 4,
        "model": {"numLayers": 2, "hiddenSize": 64, "numAttentionHeads": 4, "seqLength": 64, "vocabSize": 128},
        "data": {"mock": True},
        "training": {"microBatchSize": 1, "globalBatchSize": 24, "trainIters": 4, "lr": 0.01},
        "profile": "gpu",
    }
    kind = {"apiVersion": "megatronapp.io/v1alpha1", "kind": "MegatronJob"}
    document = {**kind, "metadata": metadata, "spec": own}
    profile = Profile(kind=ProfileKind.CLUSTER, name="gpu", template=template)
    spent = {"spares": 1, "sparesSince": TIME, "spareSeconds": 7200.0, "spareGpuSeconds": 57600.0}
    status = {"timeSpent": spent, "gangSize": {"data": 3, "sinceAttempt": 2}}
    job = ClusterJob(document | {"status": status})
    for layered, replicas, cost in (
        (load_layered_job(document, [profile]), "3 of 4", ", cost 40.00"),
        (None, "3", ""),
    ):
        head = [re.sub(r" {2,}", " ", line) for line in describe.lines(job, [], place=[], layered=layered)]
        assert f"Replicas: {replicas} since attempt 2" in head
        assert f"Spares: 1, held for 120m (16.00 GPU-hours{cost})" in head


@pytest.mark.parametrize(("price", "cost"), [({}, ""), ({"gpuHourPrice": 2.5}, ", cost 40.00")], ids=["hours", "price"])
def test_describe_shows_spares_and_their_cost(price: dict[str, float], cost: str) -> None:
    spent = {"spares": 1, "sparesSince": TIME, "spareSeconds": 7200.0, "spareGpuSeconds": 57600.0}
    status = {"timeSpent": spent, "takeovers": [{"worker": 2, "pod": "gpt-spare-0-3"}]}
    metadata = {"name": "gpt", "namespace": "team", "uid": "u", "creationTimestamp": TIME}
    job = ClusterJob({"metadata": metadata, "spec": {"analyzer": price}, "status": status})
    head = [re.sub(r" {2,}", " ", line) for line in describe.lines(job, [], place=[])]
    assert f"Spares: 1, held for 120m (16.00 GPU-hours{cost})" in head
    assert "Former spare: gpt-spare-0-3 is worker 2" in head


def test_describe_shows_which_eviction_waits_and_the_newest_checkpoint() -> None:
    waits = {"type": "EvictionsRefused", "status": "True", "reason": "EvictionWaits", "lastTransitionTime": TIME}
    status = {
        "progress": {"iteration": 9, "checkpointIteration": 7, "checkpointTime": TIME},
        "conditions": [waits | {"message": "node n1 is cordoned: an eviction waits for a checkpoint"}],
    }
    metadata = {"name": "gpt", "namespace": "team", "uid": "u", "creationTimestamp": TIME}
    job = ClusterJob({"metadata": metadata, "spec": {}, "status": status})
    head = [re.sub(r" {2,}", " ", line) for line in describe.lines(job, [], place=[])]
    assert "Evictions: refused: node n1 is cordoned: an eviction waits for a checkpoint" in head
    assert [line.startswith("Checkpoint: step 7, taken ") and line.endswith(" ago") for line in head].count(True) == 1


@pytest.mark.parametrize("damaged", [{}, {"state": 3}, {"state": "confirmed", "subject": "rank 1"}, "rank 1", None])
def test_a_damaged_verdict_of_a_job_does_not_hide_all_jobs(damaged: Any) -> None:
    verdict = {"id": "v", "state": "confirmed", "cause": "compute", "subject": {"type": "rank", "ranks": [1]}}
    assert slow_subjects({"slowRanks": [damaged, verdict]}) == ["rank-1"]


@pytest.mark.parametrize("output", [None, "wide", "name", "json", "yaml"])
def test_get_writes_no_escape_sequence(output: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(job=None, output=output, watch=False, no_headers=False)
    get.show(FakeSource(), arguments, namespaces=True)
    text = capsys.readouterr().out
    assert "gpt" in text
    assert not MOVES.search(text)
    if output == "json":
        assert json.loads(text)["items"][0]["status"]["phase"] == EVIL


def test_a_row_is_a_single_line_whatever_its_cells_contain() -> None:
    assert format_table([["A", "B"], ["x\ny\tz", "w"]]) == "A       B\nx y z   w\n"


@given(st.text(st.characters(), max_size=30))
def test_plain_keeps_all_but_what_moves(text: str) -> None:
    assert not MOVES.search(replace_control_characters(text))
    assert len(to_single_line(text).splitlines()) <= 1
    assert replace_control_characters(text) == text or MOVES.search(text)


def test_errors_are_printed_plainly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Check `megatronapp` itself, which prints what any part raises, such as the message of an API server about a
    pod."""

    def fail(_: argparse.Namespace) -> int:
        raise OperatorError(EVIL)

    monkeypatch.setattr(get, "main", fail)
    assert cli.main(["get"]) == 1
    errors = capsys.readouterr().err
    assert errors == "".join(f"error: {replace_control_characters(line)}\n" for line in EVIL.splitlines())
    assert not MOVES.search(errors)


def test_a_training_that_has_not_begun_has_no_step() -> None:
    empty = dict.fromkeys(("step", "stepsLeft", "pausedSince", "captureEvery", "lease"))
    text = orders.describe({"state": "starting", "totalSteps": 400, "perturbed": [], **empty})
    assert text.splitlines()[:2] == ["State:    starting", "Step:     <none>"]
