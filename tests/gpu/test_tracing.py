"""Tracing on devices: no bit of a training changes, no wait is added, and records have the device's times."""

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import late_pages
import numpy as np
import pytest
from device_training import STEPS, train, train_on_all_kernels
from late_pages import window

from megatronapp_common.trace import RECORD, Flag, RecordKind

RunRanks = Callable[..., list[Any]]
LAYOUTS = [
    pytest.param(1, "", id="one"),
    pytest.param(2, "--pipeline-model-parallel-size 2", id="PP2", marks=pytest.mark.gpus(2)),
    pytest.param(2, "--tensor-model-parallel-size 2", id="TP2", marks=pytest.mark.gpus(2)),
    pytest.param(2, "--overlap-grad-reduce --use-distributed-optimizer", id="DP2", marks=pytest.mark.gpus(2)),
]


def traced(
    run_ranks: RunRanks,
    folder: pathlib.Path,
    world: int,
    flags: str,
    function: Callable[[str], dict[str, Any]] = train,
) -> list[dict[str, Any]]:
    environment = {"MEGATRONAPP_SHM_DIR": str(folder), "MEGATRONAPP_SHM_PREFIX": "test"}
    results = run_ranks(world, function, f"--deterministic-mode --trace {flags}", environment=environment)
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


HALF = "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2"
TENSOR_LAYOUTS = {
    "TP2": HALF,
    "TP2-fp32": "--tensor-model-parallel-size 2",
    "TP2-SP": f"{HALF} --sequence-parallel",
    "TP2-SP-llama": f"{HALF} --sequence-parallel --swiglu --normalization RMSNorm --disable-bias-linear",
    "TP2-windows": f"{HALF} --trace-interval 5 --continuous-trace-iterations 1 --trace-granularity base "
    "--trace-budget 100",
}
LARGER = {
    "TP2xPP2-SP": f"{HALF} --sequence-parallel --pipeline-model-parallel-size 2",
    "TP2xPP2-MegaDPP": f"{HALF} --sequence-parallel --pipeline-model-parallel-size 2 --use-dpp "
    "--dpp-schedule zero-bubble",
}
"""Layouts of four devices."""


def train_counting(flags: str) -> dict[str, Any]:
    """Train on all of our own kernels; `launches`: of CUDA graphs."""
    import torch

    whole, launches = torch.cuda.CUDAGraph.replay, 0

    def counting(graph: Any) -> None:
        nonlocal launches
        launches += 1
        whole(graph)

    replaced: Any = torch.cuda.CUDAGraph
    replaced.replay = counting
    return train_on_all_kernels(flags) | {"launches": launches}


def collectives(result: dict[str, Any]) -> np.ndarray:
    """Return the records of collectives over the tensor group, by start on the device."""
    records = np.frombuffer(result["records"], RECORD)
    found = records[np.isin(records["kind"], [RecordKind.TP_REDUCE, RecordKind.TP_GATHER])]
    assert (found["flags"] & Flag.DEVICE_CLOCK).all()
    return np.sort(found, order="start_ns")


def keys_of(records: np.ndarray) -> list[tuple[int, ...]]:
    names = ("step", "kind", "microbatch", "chunk", "comm", "ordinal")
    return [tuple(int(record[name]) for name in names) for record in records]


def assert_replays_record_collectives(run_ranks: RunRanks, folder: pathlib.Path, world: int, flags: str) -> None:
    expected = traced(run_ranks, folder, world, f"{flags} --cuda-graph-impl none", train_counting)
    found = traced(run_ranks, folder, world, flags, train_counting)
    for plain, replayed in zip(expected, found, strict=True):
        assert not plain["launches"]
        assert replayed["launches"]
        assert replayed["losses"] == plain["losses"]
        assert replayed["norms"] == plain["norms"]
        assert replayed["synchronisations"] <= plain["synchronisations"]
        assert keys_of(collectives(replayed)) == keys_of(collectives(plain))
        assert (collectives(replayed)["duration"] > 0).all()


@pytest.mark.gpus(2)
@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
def test_replayed_tensor_ranks_record_the_collectives_of_others(
    run_ranks: RunRanks, tmp_path: pathlib.Path, layout: str
) -> None:
    assert_replays_record_collectives(run_ranks, tmp_path, 2, TENSOR_LAYOUTS[layout])


@pytest.mark.gpus(4)
@pytest.mark.parametrize("layout", LARGER)
def test_replayed_tensor_ranks_of_stages_record_the_collectives_of_others(
    run_ranks: RunRanks, tmp_path: pathlib.Path, layout: str
) -> None:
    assert_replays_record_collectives(run_ranks, tmp_path, 4, LARGER[layout])


def train_with_late_pages(flags: str, pages: late_pages.Pages) -> dict[str, Any]:
    """Train on all of our own kernels; `launches`: of CUDA graphs, by step."""
    import torch

    launches = late_pages.install(pages)
    whole = torch.cuda.CUDAGraph.replay

    def counting(graph: Any) -> None:
        launches[-1] += 1
        whole(graph)

    replaced: Any = torch.cuda.CUDAGraph
    replaced.replay = counting
    return train_on_all_kernels(flags) | {"launches": launches}


@pytest.mark.gpus(2)
@pytest.mark.parametrize("layout", ["TP2", "TP2-SP"])
def test_a_tensor_group_replays_a_step_on_all_ranks_or_on_none(
    run_ranks: RunRanks, tmp_path: pathlib.Path, layout: str
) -> None:
    """One rank has the windows at the start, and the other within the second of them."""
    windows = [window(0, "base"), window(4, "full")]
    environment = {"MEGATRONAPP_SHM_DIR": str(tmp_path), "MEGATRONAPP_SHM_PREFIX": "test"}
    flags = f"--deterministic-mode {TENSOR_LAYOUTS[layout]}"
    pages = [{0: windows}, {5: windows}]
    found = run_ranks(2, train_with_late_pages, f"--trace {flags}", pages, environment=environment)
    expected = run_ranks(2, train_counting, flags)
    for plain, result in zip(expected, found, strict=True):
        assert result["losses"] == plain["losses"]
        replayed = [launches > 0 for launches in result["launches"][:STEPS]]
        assert replayed == [False, False, False, True, False, False, False, True]
    first, second = (sorted(keys_of(collectives(result))) for result in found)
    assert first == second


@pytest.mark.gpus(2)
def test_passes_are_divided_only_where_they_are_traced(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    divided = traced(run_ranks, tmp_path, 2, HALF, train_counting)
    whole = run_ranks(2, train_counting, f"--deterministic-mode {HALF}")
    for name in ("losses", "norms", "synchronisations"):
        assert [result[name] for result in divided] == [result[name] for result in whole]
    assert [result["launches"] for result in divided] == [3 * result["launches"] for result in whole]
    assert all(result["launches"] for result in whole)
