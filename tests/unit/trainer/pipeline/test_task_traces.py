"""Traces of training under --use-dpp: each task once, its transfers matched, and what runs early marked."""

import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import late_inputs
import numpy as np
import pytest
import small_training

from megatronapp_common.trace import (
    BYTES_UNIT,
    DURATION_UNIT_NS,
    PASS_KINDS,
    RECORD,
    PassFlag,
    RecordKind,
    TransferPath,
)
from megatronapp_trainer.pipeline.planning.orders import interleaved, zero_bubble_v
from megatronapp_trainer.pipeline.planning.tasks import Placement, Shape, Task, TaskKind

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
Rank = tuple[dict[str, Any], np.ndarray]
MICROBATCHES, STEPS = 6, 2
PLACEMENT = Placement(2, 2)
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    f"--global-batch-size {MICROBATCHES} --train-iters {STEPS} --lr 2e-3 --mock-data --vocab-size 120 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --trace "
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-dpp"
)
MESSAGE_BYTES = 16 * 32 * 4
KINDS = {
    RecordKind.FORWARD: TaskKind.FORWARD,
    RecordKind.BACKWARD: TaskKind.BACKWARD,
    RecordKind.WEIGHT: TaskKind.WEIGHT,
}


SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def train(flags: str, seed: int | None = None) -> tuple[dict[str, Any], bytes]:
    """Train on this rank. Returns metadata and records of its ring.

    With a seed, inputs are late; without, the second microbatch reaches the first chunk before the first one.
    """
    run = small_training.prepare(f"{MODEL} {flags}")
    import megatronapp_native as native
    from megatronapp_trainer import scan
    from megatronapp_trainer.parallel.groups import destroy_groups
    from megatronapp_trainer.scan.run_context import RunContext
    from megatronapp_trainer.training.build import build_iterators, build_schedule
    from megatronapp_trainer.training.loop import Trainer
    from megatronapp_trainer.training.signals import StopRequest

    if seed is None:
        late_inputs.wrap_transport(late_inputs.SecondFirst)
    else:
        late_inputs.install(seed + run.layout.rank)
    context = RunContext(
        config=run.config,
        layout=run.layout,
        device_name=run.device.name,
        chunks=run.state.chunks,
        num_microbatches=MICROBATCHES,
    )
    observer = scan.start(context)
    schedule = build_schedule(run, observer)
    Trainer(
        run, build_iterators(run.config, run.layout, 0), schedule, stop_request=StopRequest(), observer=observer
    ).train()
    schedule.close()
    observer.close()
    destroy_groups()
    ring = pathlib.Path(os.environ["MEGATRONAPP_SHM_DIR"]) / f"test.rank{run.layout.rank}.ring"
    reader = native.RingReader(str(ring))
    data, lost = reader.read(1_000_000)
    assert lost == 0
    return json.loads(reader.info().metadata), data


@pytest.fixture(scope="module")
def ranks(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    """Metadata and records by rank, where inputs are late."""
    return traced(run_ranks, tmp_path_factory.mktemp("rings"), "", 7)


def traced(run_ranks: RunRanks, directory: pathlib.Path, *arguments: Any) -> list[Rank]:
    """Metadata and records by rank of `train`."""
    environment = {"MEGATRONAPP_SHM_DIR": str(directory), "MEGATRONAPP_SHM_PREFIX": "test"}
    results = run_ranks(2, train, *arguments, environment=environment)
    return [(metadata, np.frombuffer(data, RECORD)) for metadata, data in results]


def passes_of(records: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each step and its passes, by start."""
    for step in range(STEPS):
        found = records[(records["step"] == step) & np.isin(records["kind"], [int(kind) for kind in PASS_KINDS])]
        yield step, found[np.argsort(found["start_ns"])]


def task_of(record: np.void) -> Task:
    return Task(KINDS[RecordKind(int(record["kind"]))], int(record["microbatch"]), int(record["chunk"]))


def end_ns(record: np.void) -> int:
    return int(record["start_ns"]) + int(record["duration"]) * DURATION_UNIT_NS


def test_each_task_runs_once_and_weights_follow_their_backward_pass(ranks: list[Rank]) -> None:
    expected = {
        Task(kind, microbatch, chunk) for kind in TaskKind for microbatch in range(MICROBATCHES) for chunk in range(2)
    }
    for _, records in ranks:
        for _, passes in passes_of(records):
            tasks = [task_of(record) for record in passes]
            assert len(tasks) == len(expected)
            assert set(tasks) == expected
            place = {task: index for index, task in enumerate(tasks)}
            for task in tasks:
                if task.kind is TaskKind.WEIGHT:
                    assert place[task] > place[Task.backward(task.microbatch, task.chunk)]


def test_passes_and_waits_never_overlap(ranks: list[Rank]) -> None:
    apart = [int(kind) for kind in PASS_KINDS | {RecordKind.RECV_WAIT, RecordKind.DATA, RecordKind.GRAD_REDUCE}]
    for _, records in ranks:
        spans = np.sort(records[np.isin(records["kind"], apart)], order="start_ns")
        assert all(end_ns(before) <= int(after["start_ns"]) for before, after in itertools.pairwise(spans))


def test_a_pass_is_marked_where_a_task_before_it_in_the_plan_has_not_run(ranks: list[Rank]) -> None:
    marked = 0
    for rank, (_, records) in enumerate(ranks):
        plan = interleaved(PLACEMENT, MICROBATCHES, rank)
        for _, passes in passes_of(records):
            left = list(plan)
            for record in passes:
                task, early = task_of(record), bool(record["flags"] & PassFlag.EARLY)
                assert early == (task.kind is not TaskKind.WEIGHT and task != left[0]), (rank, str(task))
                marked += early
                if task.kind is not TaskKind.WEIGHT:
                    left.remove(task)
    assert marked > 0


def test_transfers_match_between_sender_and_receiver(ranks: list[Rank]) -> None:
    found: dict[RecordKind, dict[tuple[int, int, int, int], np.void]] = {
        kind: {} for kind in (RecordKind.SEND_POST, RecordKind.COPY, RecordKind.RECV_WAIT)
    }
    for metadata, records in ranks:
        pairs = {comm["slot"]: tuple(comm["members"]) for comm in metadata["comms"] if comm["kind"] == "p2p"}
        for record in records:
            if (kind := RecordKind(int(record["kind"]))) in found:
                key = (*pairs[int(record["comm"])], int(record["step"]), int(record["ordinal"]))
                assert key not in found[kind]
                found[kind][key] = record
    sent, copied, taken = found.values()
    assert set(sent) == set(copied) == set(taken)
    assert len(sent) == STEPS * MICROBATCHES * 2 * (PLACEMENT.stages - 1)
    for key, copy in copied.items():
        assert int(copy["aux"]) * BYTES_UNIT == int(sent[key]["aux"]) * BYTES_UNIT == MESSAGE_BYTES
        assert int(sent[key]["start_ns"]) <= int(copy["start_ns"])
        assert end_ns(copy) <= end_ns(taken[key]) + DURATION_UNIT_NS
        assert copy["layer"] == TransferPath.SHARED_MEMORY


def test_the_input_of_a_pass_is_taken_right_before_it(ranks: list[Rank]) -> None:
    for rank, (_, records) in enumerate(ranks):
        taken = {
            (int(record["step"]), int(record["ordinal"])): end_ns(record)
            for record in records
            if record["kind"] == RecordKind.RECV_WAIT
        }
        for step, passes in passes_of(records):
            before_ns = 0
            for record in passes:
                task = task_of(record)
                source = PLACEMENT.previous_task(rank, task)
                if source is not None and source.rank != rank:
                    ordinal = int(record["kind"]) << 24 | task.chunk << 16 | task.microbatch
                    assert before_ns <= taken.pop((step, ordinal)) <= int(record["start_ns"])
                before_ns = end_ns(record)
        assert not taken


def test_parameters_are_gathered_before_the_first_forward_pass_of_a_chunk(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    firsts = set()
    for rank, (_, records) in enumerate(traced(run_ranks, tmp_path, SHARDED)):
        gathers = np.sort(records[records["kind"] == RecordKind.PARAM_GATHER], order="start_ns")
        for step, passes in passes_of(records):
            forwards = [record for record in passes if record["kind"] == RecordKind.FORWARD]
            begun = [next(record for record in forwards if record["chunk"] == chunk) for chunk in (0, 1)]
            for first in begun:
                before_ns = max(
                    (end_ns(record) for record in passes if record["start_ns"] < first["start_ns"]), default=0
                )
                gather = gathers[(gathers["step"] == step) & (gathers["start_ns"] < first["start_ns"])][-1]
                assert before_ns <= int(gather["start_ns"])
                assert end_ns(gather) <= int(first["start_ns"])
            firsts.add((rank, int(begun[0]["microbatch"])))
    assert firsts == {(0, 0), (1, 1)}, "the second microbatch of rank 1 runs first"


@pytest.mark.full("a trace of another placement")
def test_stages_in_a_vee_are_traced_in_the_order_of_their_plan(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    placement = Placement(2, 2, Shape.VEE)
    found = traced(run_ranks, tmp_path, "--dpp-schedule zero-bubble", 7)
    taken = 0
    for rank, (metadata, records) in enumerate(found):
        assert metadata["layout"]["vee"] == 1
        for _, passes in passes_of(records):
            assert tuple(map(task_of, passes)) == zero_bubble_v(placement, MICROBATCHES, rank)
            assert not (passes["flags"] & PassFlag.EARLY).any()
        taken += int((records["kind"] == RecordKind.COPY).sum())
    handed_over = 2  # the output of the last rank's first chunk, and its gradient, stay on that rank
    assert taken == STEPS * MICROBATCHES * (2 * (placement.stages - 1) - handed_over)
