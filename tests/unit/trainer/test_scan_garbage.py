"""Garbage collections in traces: which are recorded, and where."""

import gc
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import traced_training
from hypothesis import given
from hypothesis import strategies as st
from traced_training import STEPS, records

import megatronapp_native as native
from megatronapp_common.trace import DURATION_UNIT_NS, RecordKind
from megatronapp_trainer.scan.garbage import LEAST_NS, GarbageListener

RunRanks = Callable[..., list[Any]]
OBJECTS = 200_000
"""Lists that refer to each other: the collector takes some 10 ms for them."""


class Collection(NamedTuple):
    """A collection as the collector announces it, in ns."""

    pause_ns: int
    length_ns: int
    processor_ns: int
    is_ours: bool
    """True if the loop collects within a span."""


class TwoClocks:
    """Time and processor time that the test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.processor_ns = 0

    def listener(self, **named: int) -> GarbageListener:
        return GarbageListener(monotonic_ns=lambda: self.now_ns, processor_ns=lambda: self.processor_ns, **named)

    def collect(self, listener: GarbageListener, length_ns: int, processor_ns: int) -> None:
        listener.notice("start", {"generation": 2})
        self.now_ns += length_ns
        self.processor_ns += processor_ns
        listener.notice("stop", {"generation": 2, "collected": 0, "uncollectable": 0})


NS = st.sampled_from((0, 1, LEAST_NS - 1, LEAST_NS, LEAST_NS + 1, 10**9)) | st.integers(0, 2 * LEAST_NS)


@given(st.lists(st.builds(Collection, NS, NS, NS, st.booleans())), st.booleans())
def test_collections_are_noted_that_use_the_processor_for_long(seen: list[Collection], is_late: bool) -> None:
    clocks, expected = TwoClocks(), []
    listener = clocks.listener()
    if is_late:  # attached within a collection
        listener.notice("stop", {"generation": 0, "collected": 0, "uncollectable": 0})
    for each in seen:
        clocks.now_ns += each.pause_ns
        begin_ns, listener.is_paused = clocks.now_ns, each.is_ours
        clocks.collect(listener, each.length_ns, each.processor_ns)
        if not each.is_ours and min(each.length_ns, each.processor_ns) >= LEAST_NS:
            expected.append((begin_ns, begin_ns + each.length_ns))
    assert listener.take() == expected
    assert listener.take() == []


def test_more_collections_than_wait_at_most_are_missing_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    clocks = TwoClocks()
    listener = clocks.listener(most=2)
    for _ in range(5):
        clocks.collect(listener, LEAST_NS, LEAST_NS)
    assert len(listener.take()) == 2
    assert "3 garbage collections are not recorded" in caplog.text
    caplog.clear()
    clocks.collect(listener, LEAST_NS, LEAST_NS)
    with caplog.at_level(logging.DEBUG):
        assert len(listener.take()) == 1
    assert not caplog.text


@pytest.fixture
def listener() -> Iterator[GarbageListener]:
    """Listen to the collector of this process, which collects only as the test does."""
    gc.disable()
    listener = GarbageListener(monotonic_ns=native.monotonic_ns)
    listener.attach()
    yield listener
    listener.close()
    gc.enable()


def object_graph() -> list[Any]:
    """Return a large graph of objects that refer to each other."""
    graph: list[Any] = [[] for _ in range(OBJECTS)]
    for number, each in enumerate(graph):
        each.append(graph[number - 1])
    return graph


def test_a_long_collection_is_noted_and_short_ones_are_not(listener: GarbageListener) -> None:
    gc.collect()
    listener.take()
    for _ in range(100):
        gc.collect(0)
    assert listener.take() == []
    graph = object_graph()
    begin_ns = native.monotonic_ns()
    gc.collect()
    end_ns = native.monotonic_ns()
    ((start_ns, stop_ns),) = listener.take()
    assert begin_ns <= start_ns < stop_ns <= end_ns
    assert len(graph) == OBJECTS


def test_a_collection_of_another_thread_is_noted(listener: GarbageListener) -> None:
    graph = object_graph()
    listener.take()
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert len(listener.take()) == 1
    assert len(graph) == OBJECTS


def test_nothing_is_noted_after_the_end(listener: GarbageListener) -> None:
    graph = object_graph()
    listener.attach()  # again, which changes nothing
    listener.take()
    listener.close()
    assert listener.notice not in gc.callbacks
    gc.collect()
    assert listener.take() == []
    assert len(graph) == OBJECTS
    listener.close()


def train_collecting(flags: list[str], collects: bool) -> dict[str, Any]:
    """Train on a rank with a large graph of objects, which it collects in some of the calls of its model.

    `collected`: begin and end of each of these; the second is of another thread. `callbacks`: those that are left.
    """
    import torch

    graph, calls, collected = object_graph(), 0, []

    def collect() -> None:
        begin_ns = native.monotonic_ns()
        gc.collect()
        collected.append((begin_ns, native.monotonic_ns()))

    def before(module: Any, _inputs: object) -> None:
        nonlocal calls
        if type(module).__name__ != "TransformerBlock":
            return
        calls += 1
        if calls == 3:
            collect()
        if calls == 5:
            thread = threading.Thread(target=collect)
            thread.start()
            thread.join()

    if collects:
        torch.nn.modules.module.register_module_forward_pre_hook(before)
    gc.collect()
    gc.disable()  # all collections are those of the test and of the loop
    result = traced_training.train(flags)
    return result | {"collected": collected, "callbacks": len(gc.callbacks), "objects": len(graph)}


def run_collecting(
    run_ranks: RunRanks, folder: pathlib.Path, flags: str, *, collects: bool
) -> tuple[dict[str, Any], list[tuple[int, int, int]]]:
    """Return the result of a rank, and the step, begin and end of its records of collections."""
    environment = {"MEGATRONAPP_SHM_DIR": str(folder), "MEGATRONAPP_SHM_PREFIX": "test"}
    flags = f"--trace --global-batch-size {2 * traced_training.MICROBATCHES} {flags}"
    (result,) = run_ranks(1, train_collecting, flags.split(), collects, environment=environment)
    return result, spans_of(result, RecordKind.GC)


def spans_of(result: dict[str, Any], kind: RecordKind) -> list[tuple[int, int, int]]:
    found = records(result)
    return [
        (int(each["step"]), int(each["start_ns"]), int(each["start_ns"]) + int(each["duration"]) * DURATION_UNIT_NS)
        for each in found[found["kind"] == kind]
    ]


@pytest.mark.torch
def test_collections_within_passes_are_recorded(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    result, found = run_collecting(run_ranks, tmp_path, "", collects=True)
    assert len(found) == len(result["collected"]) == 2
    passes = spans_of(result, RecordKind.FORWARD)
    for (step, start_ns, end_ns), (begin_ns, stop_ns) in zip(found, result["collected"], strict=True):
        assert begin_ns <= start_ns < end_ns <= stop_ns
        assert end_ns - start_ns >= LEAST_NS
        assert any(step == of and begin <= start_ns and end_ns <= end for of, begin, end in passes)
        written = [int(each["kind"]) for each in records(result) if each["step"] == step]
        assert written.index(RecordKind.GC) < written.index(RecordKind.STEP), "known when the step is whole"
    assert result["callbacks"] == 0


@pytest.mark.torch
def test_a_collection_of_the_loop_is_recorded_once(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    result, found = run_collecting(run_ranks, tmp_path, "--manual-gc --manual-gc-interval 2", collects=False)
    assert [step for step, _, _ in found] == list(range(1, STEPS, 2))
    assert all(end_ns - start_ns >= LEAST_NS for _, start_ns, end_ns in found)
    assert result["callbacks"] == 0
