"""Traces of real training: the tracer changes no bit, and its records describe the step exactly."""

import itertools
import json
import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from traced_training import MICROBATCHES, STEPS, records, traced

from megatronapp_common.trace import COMPUTE_KINDS, NO_MICROBATCH, P2P_KINDS, Flag, Metric, RecordKind

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
PIPELINE = f"--global-batch-size {2 * 2 * MICROBATCHES} --pipeline-model-parallel-size 2"
INTERLEAVED = f"--global-batch-size {2 * MICROBATCHES} --pipeline-model-parallel-size 2"
INTERLEAVED += " --num-layers-per-virtual-pipeline-stage 1"
FAULT = [{"rank": 1, "kind": "compute", "factor": 4, "fromStep": 3, "steps": 2}]


@pytest.fixture(scope="module")
def pipeline(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """PP2 x DP2, traced, with rank 1 four times slower in steps 3 and 4."""
    flags = [*PIPELINE.split(), "--trace", "--faults", json.dumps(FAULT)]
    return traced(run_ranks, tmp_path_factory.mktemp("rings"), 4, *flags)


@pytest.fixture(scope="module")
def interleaved(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return traced(run_ranks, tmp_path_factory.mktemp("rings"), 2, *INTERLEAVED.split(), "--trace")


def test_tracing_changes_no_bit(pipeline: list[dict[str, Any]], run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    plain = traced(run_ranks, tmp_path, 4, *PIPELINE.split())
    assert [result["losses"] for result in plain] == [result["losses"] for result in pipeline]
    assert len(plain[2]["losses"]) == STEPS
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["pipeline", "interleaved"])
def test_every_send_has_its_receive(layout: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(layout)
    sent, received = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for result in results:
        pairs = {
            communicator["slot"]: tuple(communicator["members"])
            for communicator in result["metadata"]["comms"]
            if communicator["kind"] == "p2p"
        }
        for record in records(result):
            key = (pairs.get(int(record["comm"])), int(record["step"]), int(record["ordinal"]))
            if record["kind"] == RecordKind.SEND_POST:
                sent[*key, int(record["aux"])] += 1
            if record["kind"] == RecordKind.RECV_POST:
                received[*key, int(record["aux"])] += 1
    assert sent == received
    assert set(sent.values()) == {1}
    per_step = 2 * MICROBATCHES * (2 if layout == "pipeline" else 3)
    assert len(sent) == STEPS * per_step


@pytest.mark.parametrize("layout", ["pipeline", "interleaved"])
def test_every_receive_is_waited_for(layout: str, request: pytest.FixtureRequest) -> None:
    """Check also that no send is waited for that was not posted; megatron-core's interleaved schedule leaves its last
    sends alone."""
    for result in request.getfixturevalue(layout):
        keys = [(int(r["kind"]), int(r["step"]), int(r["comm"]), int(r["ordinal"])) for r in records(result)]
        of = {kind: {key[1:] for key in keys if key[0] == kind} for kind in P2P_KINDS}
        assert of[RecordKind.RECV_POST] == of[RecordKind.RECV_WAIT]
        assert of[RecordKind.SEND_POST] >= of[RecordKind.SEND_WAIT]
        assert layout == "interleaved" or of[RecordKind.SEND_POST] == of[RecordKind.SEND_WAIT]


@pytest.mark.parametrize(("layout", "chunks"), [("pipeline", 1), ("interleaved", 2)])
def test_every_microbatch_runs_forward_and_backward_once(
    layout: str, chunks: int, request: pytest.FixtureRequest
) -> None:
    expected = {(step, chunk, m) for step in range(STEPS) for chunk in range(chunks) for m in range(MICROBATCHES)}
    for result in request.getfixturevalue(layout):
        for kind in (RecordKind.FORWARD, RecordKind.BACKWARD):
            found = [
                (int(r["step"]), int(r["chunk"]), int(r["microbatch"])) for r in records(result) if r["kind"] == kind
            ]
            assert len(found) == len(expected)
            assert set(found) == expected


@pytest.mark.parametrize("layout", ["pipeline", "interleaved"])
def test_compute_and_waits_never_overlap(layout: str, request: pytest.FixtureRequest) -> None:
    apart = (
        COMPUTE_KINDS
        | P2P_KINDS
        | {RecordKind.DATA, RecordKind.GRAD_REDUCE, RecordKind.GRAD_NORM, RecordKind.PARAM_GATHER}
    ) - {
        RecordKind.SEND_POST,
        RecordKind.RECV_POST,  # posts of one call carry the interval of the call
    }
    for result in request.getfixturevalue(layout):
        spans = sorted(
            (int(r["start_ns"]), int(r["start_ns"]) + int(r["duration"]) * 8)
            for r in records(result)
            if r["kind"] in apart
        )
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.full("each chunk waits alike", but=("one-chunk",))
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("", id="one-chunk"),
        pytest.param("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", id="two-chunks"),
    ],
)
def test_an_overlapped_gather_is_waited_for_before_the_first_forward(
    run_ranks: RunRanks, tmp_path: pathlib.Path, layout: str
) -> None:
    flags = f"--global-batch-size 16 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000 {layout}"
    world, chunks = (4, 2) if layout else (2, 1)
    traces = traced(run_ranks, tmp_path, world, *flags.split(), "--trace")
    for rank, result in enumerate(traces):
        found = records(result)
        for step in range(STEPS):
            own = found[found["step"] == step]
            gathers = [int(span["ordinal"]) for span in own if span["kind"] == RecordKind.PARAM_GATHER]
            assert gathers[:chunks] == list(range(chunks)), rank
            kinds = [int(span["kind"]) for span in own if span["kind"] in {RecordKind.PARAM_GATHER, RecordKind.FORWARD}]
            assert kinds[:2] == [RecordKind.PARAM_GATHER, RecordKind.FORWARD]
        waits = found[found["kind"] == RecordKind.PARAM_GATHER]
        passes = found[found["kind"] == RecordKind.FORWARD]
        ends = passes["start_ns"] + passes["duration"].astype(np.uint64) * 8
        for span in waits:
            assert not ((passes["start_ns"] <= span["start_ns"]) & (span["start_ns"] < ends)).any()
    plain = traced(run_ranks, tmp_path / "off", world, *flags.split())
    assert [result["losses"] for result in plain] == [result["losses"] for result in traces]


def test_each_step_has_a_single_step_span_around_its_spans(pipeline: list[dict[str, Any]]) -> None:
    for result in pipeline:
        found = records(result)
        steps = found[found["kind"] == RecordKind.STEP]
        assert steps["step"].tolist() == list(range(STEPS))
        for step in steps:
            own = found[(found["step"] == step["step"]) & (found["kind"] < RecordKind.METRIC)]
            inside = own[own["kind"] != RecordKind.GC]  # a collection between two steps is of the first of them
            assert (inside["start_ns"] >= step["start_ns"]).all()
            ends = inside["start_ns"] + inside["duration"].astype(np.uint64) * 8
            assert ends.max() <= step["start_ns"] + int(step["duration"]) * 8 + 8


def test_the_reporting_rank_samples_the_loss_of_every_step(pipeline: list[dict[str, Any]]) -> None:
    samples = [records(result) for result in pipeline]
    losses = [
        rank_records[(rank_records["kind"] == RecordKind.METRIC) & (rank_records["comm"] == Metric.LOSS)]
        for rank_records in samples
    ]
    assert [len(rank_losses) for rank_losses in losses] == [0, 0, STEPS, 0]
    assert losses[2]["aux"].view(np.float32).tolist() == [np.float32(x) for x in pipeline[2]["losses"]]
    assert losses[2]["step"].tolist() == list(range(STEPS))


def test_a_fault_stretches_the_spans_of_its_rank_and_steps_only(pipeline: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(pipeline):
        found = records(result)
        injected = found[(found["flags"] & Flag.INJECTED > 0) & (found["kind"] != RecordKind.FAULT)]
        expected = (
            {(3, RecordKind.FORWARD), (3, RecordKind.BACKWARD), (4, RecordKind.FORWARD), (4, RecordKind.BACKWARD)}
            if rank == 1
            else set()
        )
        assert {(int(r["step"]), RecordKind(int(r["kind"]))) for r in injected} == expected
        added = found[found["kind"] == RecordKind.FAULT]
        assert len(added) == len(injected)
        for span, fault in zip(injected, added, strict=True):
            # The fault adds three times the span's own time; a preemption between the two clocks may blur that.
            assert int(span["duration"]) >= 1.25 * int(fault["duration"])
            # It slept, or waited for a processor when the sleep was about to begin.
            idle = int(span["ordinal"]) + int(span["aux"])
            assert int(span["duration"]) >= idle >= 0.9 * int(fault["duration"])


def test_only_compute_and_data_know_their_microbatch(pipeline: list[dict[str, Any]]) -> None:
    for result in pipeline:
        found = records(result)
        named = set(found["kind"][found["microbatch"] != NO_MICROBATCH].tolist())
        assert named == {RecordKind.FORWARD, RecordKind.BACKWARD, RecordKind.DATA}


def test_training_continues_without_space_for_the_ring(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    (result,) = traced(run_ranks, tmp_path / "missing", 1, "--global-batch-size", "4", "--trace")
    assert len(result["losses"]) == STEPS
    assert "records" not in result
