"""Transfers of NCCL on devices: every message and reduction has a kernel's times, equal in number on both sides."""

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_training import STEPS, train

from megatronapp_common.trace import NO_COMM, RECORD, Flag, NcclOperation, RecordKind
from megatronapp_trainer.scan.nccl_transfers import VARIABLE, plugin_path

RunRanks = Callable[..., list[Any]]


def traced(run_ranks: RunRanks, folder: pathlib.Path, flags: str) -> list[Any]:
    environment = {
        "MEGATRONAPP_SHM_DIR": str(folder),
        "MEGATRONAPP_SHM_PREFIX": "test",
        VARIABLE: str(plugin_path()),
    }
    results = run_ranks(2, train, f"--deterministic-mode --trace --trace-nccl {flags}", environment=environment)
    assert all(result["lost"] == 0 for result in results)
    return results


def transfers_of(result: dict[str, Any]) -> Any:
    records = np.frombuffer(result["records"], RECORD)
    found = records[records["kind"] == RecordKind.NCCL]
    assert (found["flags"] == Flag.AUX_BYTES | Flag.DEVICE_CLOCK).all()
    assert (found["duration"] > 0).all()
    return found


@pytest.mark.gpus(2)
def test_messages_of_a_pipeline_have_the_times_of_their_kernels(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    counts = []
    for result in traced(run_ranks, tmp_path, "--pipeline-model-parallel-size 2"):
        found = transfers_of(result)
        print({name: len(found[found["layer"] == name]) for name in NcclOperation}, found["duration"][:12] * 8)
        counts.append(Counter(found["layer"].tolist()))
    # torch makes communicators of their own for messages that are not batched, which the table does not have.
    assert counts[0][NcclOperation.SEND] == counts[1][NcclOperation.RECEIVE] >= (STEPS - 1) * 4
    assert counts[1][NcclOperation.SEND] == counts[0][NcclOperation.RECEIVE] >= (STEPS - 1) * 4


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("flags", "kind", "operation"),
    [
        ("--use-distributed-optimizer", "dp", NcclOperation.REDUCE_SCATTER),
        ("--tensor-model-parallel-size 2", "tp", NcclOperation.ALL_REDUCE),
    ],
)
def test_collectives_lie_inside_the_steps_of_both_ranks(
    run_ranks: RunRanks, tmp_path: pathlib.Path, flags: str, kind: str, operation: NcclOperation
) -> None:
    numbers = []
    for result in traced(run_ranks, tmp_path, flags):
        slot = next(comm["slot"] for comm in result["metadata"]["comms"] if comm["kind"] == kind)
        found = transfers_of(result)
        print({name: len(found[found["layer"] == name]) for name in NcclOperation}, found["duration"][:12] * 8)
        of_group = found[(found["comm"] == slot) & (found["layer"] == operation)]
        assert set(of_group["step"].tolist()) >= set(range(1, STEPS))
        assert (found["comm"] != NO_COMM).any()
        numbers.append(of_group["ordinal"].tolist())
        records = np.frombuffer(result["records"], RECORD)
        steps = records[records["kind"] == RecordKind.STEP]
        begun = dict(zip(steps["step"].tolist(), steps["start_ns"].tolist(), strict=True))
        late = [int(row["start_ns"]) - begun[int(row["step"])] for row in of_group if int(row["step"]) in begun]
        assert min(late) >= 0
    assert numbers[0] == numbers[1]


@pytest.mark.gpus(2)
def test_the_plugin_changes_no_bit(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    with_plugin = traced(run_ranks, tmp_path, "--pipeline-model-parallel-size 2")
    without = run_ranks(2, train, "--deterministic-mode --pipeline-model-parallel-size 2")
    for name in ("losses", "norms", "synchronisations"):
        assert [result[name] for result in with_plugin] == [result[name] for result in without]
