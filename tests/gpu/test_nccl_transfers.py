"""Transfers of NCCL on devices: every message and reduction has a kernel's times, unless NCCL has not reported them."""

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_training import STEPS, train

from megatronapp_common.trace import NO_COMM, RECORD, Flag, NcclOperation, RecordKind
from megatronapp_trainer.scan.nccl_transfers import VARIABLE, PluginLog, plugin_path

RunRanks = Callable[..., list[Any]]
MESSAGES = (STEPS + 1) * 4
"""Messages in each direction: of each microbatch of all steps, and of the one that counts synchronisations."""
REDUCTIONS = 20_000


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
    for result in traced(run_ranks, tmp_path, "--pipeline-model-parallel-size 2"):
        found = transfers_of(result)
        print({name: len(found[found["layer"] == name]) for name in NcclOperation}, found["duration"][:12] * 8)
        missing = 2 * MESSAGES
        for operation in (NcclOperation.SEND, NcclOperation.RECEIVE):
            ordinals = found[found["layer"] == operation]["ordinal"].tolist()
            assert set(ordinals) <= set(range(MESSAGES))
            assert len(set(ordinals)) == len(ordinals)
            missing -= len(ordinals)
        print(missing, "messages are missing,", result["transfers_without_times"], "transfers have no times")
        assert 0 <= missing <= result["transfers_without_times"]


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
    numbers, without_times = [], 0
    for result in traced(run_ranks, tmp_path, flags):
        without_times += result["transfers_without_times"]
        slot = next(comm["slot"] for comm in result["metadata"]["comms"] if comm["kind"] == kind)
        found = transfers_of(result)
        print({name: len(found[found["layer"] == name]) for name in NcclOperation}, found["duration"][:12] * 8)
        of_group = found[(found["comm"] == slot) & (found["layer"] == operation)]
        assert set(of_group["step"].tolist()) >= set(range(1, STEPS))
        assert (found["comm"] != NO_COMM).any()
        numbers.append(set(of_group["ordinal"].tolist()))
        assert len(numbers[-1]) == len(of_group)
        records = np.frombuffer(result["records"], RECORD)
        steps = records[records["kind"] == RecordKind.STEP]
        begun = dict(zip(steps["step"].tolist(), steps["start_ns"].tolist(), strict=True))
        late = [int(row["start_ns"]) - begun[int(row["step"])] for row in of_group if int(row["step"]) in begun]
        assert min(late) >= 0
    assert len(numbers[0] ^ numbers[1]) <= without_times


@pytest.mark.gpus(2)
def test_the_plugin_changes_no_bit(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    with_plugin = traced(run_ranks, tmp_path, "--pipeline-model-parallel-size 2")
    without = run_ranks(2, train, "--deterministic-mode --pipeline-model-parallel-size 2")
    for name in ("losses", "norms", "synchronisations"):
        assert [result[name] for result in with_plugin] == [result[name] for result in without]


def reduce_often() -> dict[str, Any]:
    """Reduce a few bytes many times on this rank, whose process loads the plugin."""
    import torch
    from torch import distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    log, value, found = PluginLog(), torch.zeros(64, device=device), []
    for number in range(REDUCTIONS):
        dist.all_reduce(value)
        if number % 32 == 31:
            torch.cuda.synchronize()  # NCCL keeps the times of 64 kernels
            found.append(log.take())
    deadline_s = time.monotonic() + 5
    while log.in_flight() and time.monotonic() < deadline_s:
        found.append(log.take())
    found.append(log.take())
    dist.destroy_process_group()
    transfers = np.concatenate(found)
    reductions = transfers[transfers["bytes"] == value.nbytes]
    return {
        "numbers": reductions["sequence"].tolist(),
        "lengths": (reductions["device_end_ns"] - reductions["device_start_ns"]).tolist(),
        "without_times": log.dropped() + log.in_flight(),
    }


@pytest.mark.gpus(2)
def test_each_short_reduction_has_times_or_is_counted(run_ranks: RunRanks) -> None:
    for result in run_ranks(2, reduce_often, environment={VARIABLE: str(plugin_path())}):
        numbers = result["numbers"]
        print(f"{len(numbers)} of {REDUCTIONS} have times, median {int(np.median(result['lengths']))} ns")
        assert len(set(numbers)) == len(numbers)
        assert 0 <= REDUCTIONS - len(numbers) <= result["without_times"]
        assert len(numbers) >= REDUCTIONS // 2
