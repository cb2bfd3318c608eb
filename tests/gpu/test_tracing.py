"""Tracing on devices: no bit of a training changes, no wait is added, and records have the device's times."""

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_training import STEPS, train

from megatronapp_common.trace import RECORD, Flag, RecordKind

RunRanks = Callable[..., list[Any]]
LAYOUTS = [
    pytest.param(1, "", id="one"),
    pytest.param(2, "--pipeline-model-parallel-size 2", id="PP2", marks=pytest.mark.gpus(2)),
    pytest.param(2, "--tensor-model-parallel-size 2", id="TP2", marks=pytest.mark.gpus(2)),
    pytest.param(2, "--overlap-grad-reduce --use-distributed-optimizer", id="DP2", marks=pytest.mark.gpus(2)),
]


def traced(run_ranks: RunRanks, folder: pathlib.Path, world: int, flags: str) -> list[dict[str, Any]]:
    environment = {"MEGATRONAPP_SHM_DIR": str(folder), "MEGATRONAPP_SHM_PREFIX": "test"}
    results = run_ranks(world, train, f"--deterministic-mode --trace {flags}", environment=environment)
    assert all(result["lost"] == 0 for result in results)
    return results


@pytest.mark.parametrize(("world", "flags"), LAYOUTS)
def test_tracing_changes_no_bit_and_adds_no_wait(
    run_ranks: RunRanks, tmp_path: pathlib.Path, world: int, flags: str
) -> None:
    with_tracing = traced(run_ranks, tmp_path, world, flags)
    without = run_ranks(world, train, f"--deterministic-mode {flags}")
    for name in ("losses", "norms", "synchronisations"):
        assert [result[name] for result in with_tracing] == [result[name] for result in without]


@pytest.mark.parametrize(("world", "flags"), LAYOUTS[:2])
def test_passes_have_times_of_the_device(run_ranks: RunRanks, tmp_path: pathlib.Path, world: int, flags: str) -> None:
    for result in traced(run_ranks, tmp_path, world, flags):
        records = np.frombuffer(result["records"], RECORD)
        for kind in (RecordKind.FORWARD, RecordKind.BACKWARD):
            spans = records[records["kind"] == kind]
            counts = Counter(spans["step"].tolist())
            assert [counts[step] for step in range(STEPS)] == [8 // 2] * STEPS
            assert (spans["flags"] & Flag.DEVICE_CLOCK).all()
            assert (spans["duration"] > 0).all()


@pytest.mark.gpus(2)
def test_every_message_of_a_pipeline_is_sent_and_received_once(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    sent, received = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for result in traced(run_ranks, tmp_path, 2, "--pipeline-model-parallel-size 2"):
        pairs = {comm["slot"]: tuple(comm["members"]) for comm in result["metadata"]["comms"] if comm["kind"] == "p2p"}
        for record in np.frombuffer(result["records"], RECORD):
            key = (pairs.get(int(record["comm"])), int(record["step"]), int(record["ordinal"]))
            if record["kind"] == RecordKind.SEND_POST:
                sent[key] += 1
            elif record["kind"] == RecordKind.RECV_WAIT:
                received[key] += 1
    assert sent == received
    assert set(sent.values()) == {1}


WINDOWS = "--trace-interval 2 --continuous-trace-iterations 1 --trace-budget 100"
WINDOW_LAYOUTS = [
    pytest.param(
        1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", id="recomputed"
    ),
    pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", id="TP2-SP", marks=pytest.mark.gpus(2)),
    pytest.param(2, "--pipeline-model-parallel-size 2", id="PP2", marks=pytest.mark.gpus(2)),
]


@pytest.mark.parametrize(("world", "flags"), WINDOW_LAYOUTS)
def test_windows_change_no_bit_and_add_no_wait(
    run_ranks: RunRanks, tmp_path: pathlib.Path, world: int, flags: str
) -> None:
    in_windows = traced(run_ranks, tmp_path, world, f"{flags} {WINDOWS}")
    without = run_ranks(world, train, f"--deterministic-mode {flags}")
    for name in ("losses", "norms", "synchronisations"):
        assert [result[name] for result in in_windows] == [result[name] for result in without]
    for result in in_windows:
        records = np.frombuffer(result["records"], RECORD)
        tensor = records[np.isin(records["kind"], [RecordKind.TP_REDUCE, RecordKind.TP_GATHER])]
        assert ("--tensor" in flags) == bool(len(tensor))
        for kind in (RecordKind.LAYER_FORWARD, RecordKind.LAYER_BACKWARD):
            parts = records[records["kind"] == kind]
            assert set(parts["step"].tolist()) == set(range(1, STEPS + 1, 2))
            assert (parts["flags"] & Flag.DEVICE_CLOCK).all()
            assert (parts["duration"] > 0).all()
