"""Traces of replayed passes: the collectives of tensor-parallel ranks, as of passes without recordings."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import late_pages
import numpy as np
import pytest
import traced_training
from late_pages import window
from traced_training import MICROBATCHES, STEPS, records, traced

from megatronapp_common.trace import PASS_KINDS, RecordKind

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]
TENSOR_KINDS = [RecordKind.TP_REDUCE, RecordKind.TP_GATHER]
COMMON = f"--trace --global-batch-size {2 * MICROBATCHES}"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "TP2": (2, TP2, 2),
    "TP2-SP": (2, f"{TP2} --sequence-parallel --bf16", 2),
    "TP2xPP2-VPP2": (4, f"{TP2} {PP2} --num-virtual-stages-per-pipeline-rank 2", 4),
    "TP2xPP2-SP-zero-bubble": (4, f"{TP2} {PP2} --sequence-parallel --use-dpp --dpp-schedule zero-bubble", 3),
}
"""Ranks, flags, and the passes of a microbatch on a rank that have collectives."""
PATIENCE_S = 280.0


class CollectiveKey(NamedTuple):
    """Key of a record of a collective."""

    step: int
    kind: int
    microbatch: int
    chunk: int
    comm: int
    ordinal: int
    size: int


def train_replayed(flags: list[str]) -> dict[str, Any]:
    """Train with passes that are replayed by computing again.

    `replayed`: forward passes of these; `isolated`: collectives that were replayed as a separate part.
    """
    from megatronapp_trainer.pipeline.graphs import choice, recorders
    from megatronapp_trainer.pipeline.graphs.pass_slot import PassSlot

    choice.recorders_of = lambda device, collectives: recorders.RepeatingRecorders(collectives)
    counts = {"replayed": 0, "isolated": 0}
    for owner, method, name in (
        (PassSlot, "forward", "replayed"),
        (recorders._RepeatingRecording, "_isolate", "isolated"),
    ):
        setattr(owner, method, counting(getattr(owner, method), counts, name))
    return traced_training.train(flags) | counts


def counting(function: Callable[..., Any], counts: dict[str, int], name: str) -> Callable[..., Any]:
    """Return the function, whose calls are counted under a name."""

    def counted(*arguments: Any) -> Any:
        counts[name] += 1
        return function(*arguments)

    return counted


def traced_twice(
    run_ranks: RunRanks, folder: pathlib.Path, world: int, flags: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train traced ranks without recordings of passes, and with them."""
    flags = f"{COMMON} {flags}"
    expected = traced(run_ranks, folder, world, *flags.split(), "--cuda-graph-impl", "none")
    environment = {"MEGATRONAPP_SHM_DIR": str(folder), "MEGATRONAPP_SHM_PREFIX": "test"}
    found = run_ranks(world, train_replayed, flags.split(), environment=environment, timeout_s=PATIENCE_S)
    return expected, found


def train_with_late_pages(flags: list[str], pages: late_pages.Pages) -> dict[str, Any]:
    """Train with replayed passes.

    `replayed`: forward passes that were replayed, by step; `logged`: messages about windows.
    """
    import logging

    from megatronapp_trainer.pipeline.graphs import choice, recorders
    from megatronapp_trainer.pipeline.graphs.graphed_step import MicrobatchGraph
    from megatronapp_trainer.pipeline.graphs.pass_slot import PassSlot

    choice.recorders_of = lambda device, collectives: recorders.RepeatingRecorders(collectives)
    replayed = late_pages.install(pages)
    logged: list[str] = []

    def counting_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(slot: Any, *arguments: Any) -> Any:
            replayed[-1] += 1
            return forward(slot, *arguments)

        return counted

    class Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    for owner in (PassSlot, MicrobatchGraph):
        replaced: Any = owner
        replaced.forward = counting_forward(owner.forward)
    log = logging.getLogger("megatronapp_trainer.scan.windows")
    log.setLevel(logging.INFO)
    log.addHandler(Messages())
    return traced_training.train(flags) | {"replayed": replayed, "logged": logged}


def trained_with_late_pages(
    run_ranks: RunRanks, folder: pathlib.Path, flags: str, pages: late_pages.Pages
) -> list[dict[str, Any]]:
    """Train two ranks with these pages, eight steps."""
    environment = {"MEGATRONAPP_SHM_DIR": str(folder), "MEGATRONAPP_SHM_PREFIX": "test"}
    everything = f"{COMMON} {flags} --train-iters 8".split()
    return run_ranks(2, train_with_late_pages, everything, pages, environment=environment, timeout_s=PATIENCE_S)


def test_a_tensor_group_replays_a_step_on_all_ranks_or_on_none(run_ranks: RunRanks, tmp_path: pathlib.Path) -> None:
    """One rank has the windows at the start, as after a restart, and the other within the second of them."""
    windows = [window(0, "base"), window(4, "full")]
    ranks = trained_with_late_pages(run_ranks, tmp_path, TP2, [{0: windows}, {5: windows}])
    some = MICROBATCHES
    for result in ranks:
        assert result["replayed"] == [0, 0, 0, some, 0, 0, 0, some], "1, 4 and 5 are in windows"
        layers = records(result)
        layers = layers[layers["kind"] == RecordKind.LAYER_FORWARD]
        assert set(layers["step"].tolist()) == {4, 5}
    assert [each[:2] for each in collectives(ranks[0])] == [each[:2] for each in collectives(ranks[1])]
    assert [text.split(":")[0] for text in ranks[0]["logged"]] == ["step 0"]
    assert "too late for the tensor group" in ranks[0]["logged"][0]
    assert [text.split(":")[0] for text in ranks[1]["logged"]] == ["step 1", "step 4"]
    assert all("only other ranks of the tensor group know" in text for text in ranks[1]["logged"])


@pytest.mark.full("a rare combination: windows of some replicas while weights are gathered in parallel with passes")
def test_replicas_record_in_the_same_step_where_that_gathers_weights(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    """Recordings gather all weights in advance; a replica that gathers them pass by pass would take another order."""
    flags = "--fp16 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000 --cuda-graph-impl local"
    flags = f"{flags} --global-batch-size {8 * MICROBATCHES}"
    page = {0: [window(3, "full", [0])]}
    first, second = trained_with_late_pages(run_ranks, tmp_path, flags, [page, {}])
    assert first["replayed"] == second["replayed"]
    assert first["replayed"][3:6] == [0, 0, 0]
    assert all(first["replayed"][6:])
    assert first["losses"] == second["losses"]


@pytest.mark.full("a rare combination: windows of some replicas while weights are gathered in parallel with passes")
def test_a_replica_in_a_window_transfers_in_the_order_of_others_that_replay_whole_microbatches(
    run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    """Gathers and reductions of many buckets, in a step with a window, one after it, and one that records again."""
    flags = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000 --cuda-graph-impl local"
    flags = f"{flags} --global-batch-size {8 * MICROBATCHES}"
    page = {0: [window(3, "full", [0])]}
    first, second = trained_with_late_pages(run_ranks, tmp_path, flags, [page, {}])
    some = 2 * MICROBATCHES
    assert first["replayed"] == [0, some, some, 0, 0, 0, some, some]
    assert second["replayed"] == [0, *[some] * 7]
    assert first["losses"] == second["losses"]


def collectives(result: dict[str, Any]) -> list[CollectiveKey]:
    """Return the collectives over the tensor group, in the order in which they ended."""
    ring = records(result)
    names = ("step", "kind", "microbatch", "chunk", "comm", "ordinal", "aux")
    return [CollectiveKey(*(int(r[name]) for name in names)) for r in ring[np.isin(ring["kind"], TENSOR_KINDS)]]


def assert_within_passes(result: dict[str, Any]) -> None:
    """Fail unless each collective lies within a pass of its microbatch and chunk."""
    ring = records(result)
    passes = ring[np.isin(ring["kind"], sorted(PASS_KINDS))]
    ends = passes["start_ns"] + passes["duration"].astype(np.uint64) * 8
    for record in ring[np.isin(ring["kind"], TENSOR_KINDS)]:
        end = record["start_ns"] + int(record["duration"]) * 8
        around = passes[(passes["start_ns"] <= record["start_ns"]) & (end <= ends + 8)]
        assert (int(record["chunk"]), int(record["microbatch"])) in {
            (int(each["chunk"]), int(each["microbatch"])) for each in around
        }


@pytest.mark.full("a sweep of layouts", but=("TP2-SP",))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_passes_record_the_collectives_of_others(
    run_ranks: RunRanks, tmp_path: pathlib.Path, layout: str
) -> None:
    world, flags, passes = LAYOUTS[layout]
    for expected, found in zip(*traced_twice(run_ranks, tmp_path, world, flags), strict=True):
        assert found["losses"] == expected["losses"]
        assert found["replayed"] > 0
        assert collectives(found) == collectives(expected)
        assert found["isolated"] == sum(each.step > 0 for each in collectives(found))
        if "dpp" not in flags:
            assert len(collectives(found)) == STEPS * MICROBATCHES * passes
        assert_within_passes(found)


@pytest.mark.full("the same decision with another budget", but=("budget-left",))
@pytest.mark.parametrize("budget", [100, 1e-6], ids=["budget-left", "budget-spent"])
def test_steps_of_windows_are_not_replayed(run_ranks: RunRanks, tmp_path: pathlib.Path, budget: float) -> None:
    """Windows of collectives add no hook to the modules, and their budget may be spent on one rank of a group alone."""
    window = "--trace-interval 4 --continuous-trace-iterations 1 --trace-granularity base"
    expected, found = traced_twice(run_ranks, tmp_path, 2, f"{TP2} {window} --trace-budget {budget:f}")
    for plain, replayed in zip(expected, found, strict=True):
        assert replayed["replayed"] == 2 * MICROBATCHES, "steps 1 and 5 are in windows, 0 and 2 come before a replay"
        assert collectives(replayed) == collectives(plain)
        in_windows = [each for each in collectives(replayed) if each.step in {1, 5}]
        assert (len(in_windows) > 2 * MICROBATCHES * 2) == (budget == 100)
