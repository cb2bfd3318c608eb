"""Windows: which steps they cover, and what real ranks record in them."""

import json
import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced_training import MICROBATCHES, STEPS, records, traced

from megatronapp_analyzer.offline.megatronapp_files import read_rank_files
from megatronapp_common.trace import NO_LAYER, PASS_KINDS, LayerSite, RecordKind, pass_ordinal
from megatronapp_trainer.config import TraceWindows
from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.scan.windows.agreement import PackedLevels
from megatronapp_trainer.scan.windows.budget import WindowBudget
from megatronapp_trainer.scan.windows.open_pass import OpenPass
from megatronapp_trainer.scan.windows.plan import CommandedWindow, TraceLevel, WindowPlan, commanded_windows

RunRanks = Callable[..., list[Any]]
LAYER_KINDS = (RecordKind.LAYER_FORWARD, RecordKind.LAYER_BACKWARD)
TENSOR_KINDS = (RecordKind.TP_REDUCE, RecordKind.TP_GATHER)
IN_WINDOW = [1, 2, 4, 5]
WINDOWS = "--trace --trace-interval 3 --continuous-trace-iterations 2 --trace-budget 100"
BATCH = f"--global-batch-size {2 * MICROBATCHES}"


def test_flags_choose_the_steps_of_megatronapp() -> None:
    plan = WindowPlan([0], TraceWindows(interval=5, count=2, granularity="full"))
    assert [step for step in range(13) if plan.periodic_level(step) is TraceLevel.LAYER] == [1, 2, 6, 7, 11, 12]


def test_a_commanded_window_covers_the_tensor_groups_of_its_ranks() -> None:
    page = {"windows": [{"fromStep": 4, "steps": 2, "granularity": "base", "ranks": [3, 8]}]}
    levels = {}
    for members in ([2, 3], [0, 1]):
        plan = WindowPlan(members, None)
        plan.command(commanded_windows(page))
        levels[tuple(members)] = [plan.commanded_level(step) for step in (3, 4, 5, 6)]
    phase, base = TraceLevel.PHASE, TraceLevel.COLLECTIVE
    assert levels == {(2, 3): [phase, base, base, phase], (0, 1): [phase] * 4}


def test_windows_of_flags_wait_while_they_cost_too_much(caplog: pytest.LogCaptureFixture) -> None:
    budget = WindowBudget(0.01, 1_000.0)
    plan = WindowPlan([0], TraceWindows(interval=1, count=1, granularity="full"))
    covered = []
    for step in range(1, 60):
        level = plan.periodic_level(step, budget)
        covered.append(level is TraceLevel.LAYER)
        budget.step_done(1_000_000, 100 if level is TraceLevel.LAYER else 0)  # 10 % of each step in a window
    assert 5 <= sum(covered) <= 7
    assert budget.used <= 0.02
    assert "windows have cost" in caplog.text
    plan.command([CommandedWindow(from_step=60, steps=1, level=TraceLevel.COLLECTIVE)])
    budget.step_done(1_000_000, 1_000)
    assert plan.commanded_level(60) is TraceLevel.COLLECTIVE, "a window that was ordered is recorded all the same"


@given(st.integers(1, 64), st.integers(1, 200), st.data())
def test_a_group_has_the_most_detailed_level_that_a_rank_of_it_announces(
    members: int, groups: int, data: st.DataObject
) -> None:
    packed = PackedLevels(groups, members)
    level = st.sampled_from(TraceLevel)
    announced = data.draw(st.dictionaries(st.integers(0, groups - 1), st.lists(level, min_size=1, max_size=members)))
    ranks = [packed.announcement(group, each) for group, levels in announced.items() for each in levels]
    sums = np.sum([[0.0] * packed.length, *ranks], axis=0).tolist()  # in fp64, as ranks add them
    found = [packed.level(sums, group) for group in range(groups)]
    assert found == [max(announced.get(group, [TraceLevel.PHASE])) for group in range(groups)]


def test_levels_of_ten_thousand_ranks_are_few_numbers() -> None:
    lengths = {members: PackedLevels(10_000 // members, members).length for members in (1, 2, 4, 8)}
    assert lengths == {1: 385, 2: 313, 4: 228, 8: 157}


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=3), st.lists, max_leaves=4)
FIELDS = st.sampled_from(("fromStep", "steps", "granularity", "ranks"))


@given(st.fixed_dictionaries({"windows": JSON | st.lists(st.dictionaries(FIELDS, JSON | st.just("full")), max_size=2)}))
def test_a_garbled_page_is_windows_or_a_refusal(page: dict[str, Any]) -> None:
    try:
        windows = commanded_windows(page)
    except UsageError:
        return
    assert all(isinstance(window, CommandedWindow) and window.steps >= 1 for window in windows)


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(PASS_KINDS)), st.integers(0, 63), st.integers(0, 4095), st.integers(0, 4095)),
        unique=True,
    )
)
def test_ordinals_of_collectives_are_unique(places: list[tuple[RecordKind, int, int, int]]) -> None:
    ordinals = {pass_ordinal(*place) for place in places}
    assert len(ordinals) == len(places)
    assert all(0 <= ordinal < 1 << 32 for ordinal in ordinals)


@pytest.fixture(scope="module")
def trace_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder of files of MegatronApp's form."""
    return tmp_path_factory.mktemp("files") / "trace_output"


@pytest.fixture(scope="module")
def tensor(
    run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory, trace_dir: pathlib.Path
) -> list[dict[str, Any]]:
    """TP2 x PP2, with recomputed layers on both stages."""
    flags = f"{BATCH} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 {WINDOWS}"
    flags += (
        f" --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --trace-dir {trace_dir}"
    )
    return traced(run_ranks, tmp_path_factory.mktemp("rings"), 4, *flags.split())


@pytest.fixture(scope="module")
def interleaved(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    flags = f"{BATCH} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {WINDOWS}"
    return traced(run_ranks, tmp_path_factory.mktemp("rings"), 2, *flags.split())


class Counts:
    """A recorder of which only the spans are counted."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def enter(self, _fields: Any) -> None:
        pass

    def leave_collective(self, _fields: Any, _mark: None, size_bytes: Callable[[], int]) -> None:
        self.sizes.append(size_bytes())


def call_collectives_in_passes() -> list[int]:
    """Assert which functions are replaced; returns the sizes of the recorded collectives."""
    import torch
    from megatron.core.tensor_parallel import mappings

    from megatronapp_trainer.scan.windows.tensor_collectives import TensorCollectives

    class Handle:
        def wait(self) -> None:
            pass

    def gather(*_tensors: Any, group: Any, async_op: bool = False) -> Any:
        return Handle() if async_op else None

    def current() -> Any:
        return mappings.dist_all_gather_func

    mappings.dist_all_gather_func = gather
    reduce, group, counts, whole = torch.distributed.all_reduce, object(), Counts(), torch.zeros(6)
    collectives = TensorCollectives(counts, group, 0)  # type: ignore[arg-type]
    collectives.install()
    place = OpenPass(RecordKind.FORWARD, 0, 0)
    assert current() is gather
    collectives.pass_begin(place)
    current()(whole, whole[:3], group=object())  # of another group
    assert current() is not gather
    current()(whole, whole[:3], group=group)
    assert current() is gather
    assert torch.distributed.all_reduce is reduce
    collectives.pass_begin(place)  # without an end of the pass before, as in a schedule that an error has left
    current()(whole[:2], group=group, async_op=True).wait()
    assert current() is gather
    collectives.pass_end()
    collectives.pass_begin(place)
    collectives.pass_end()
    assert current() is gather
    collectives.records_all = True
    collectives.pass_begin(place)
    current()(whole, group=group)
    current()(whole, group=group)
    replaced: Any = object()
    torch.distributed.all_reduce = replaced  # by others meanwhile
    collectives.pass_end()
    assert current() is gather
    assert torch.distributed.all_reduce is replaced
    collectives.remove()
    return counts.sizes


@pytest.mark.torch
def test_functions_of_collectives_are_replaced_until_the_first_of_a_pass(run_ranks: RunRanks) -> None:
    assert run_ranks(1, call_collectives_in_passes) == [[24, 8, 24, 24]]


@pytest.mark.torch
def test_windows_change_no_bit(
    tensor: list[dict[str, Any]], interleaved: list[dict[str, Any]], run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    flags = f"{BATCH} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    plain = traced(run_ranks, tmp_path, 2, *flags.split())
    assert [result["losses"] for result in plain] == [result["losses"] for result in interleaved]
    flags = f"{BATCH} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    flags += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    plain = traced(run_ranks, tmp_path, 4, *flags.split())
    assert [result["losses"] for result in plain] == [result["losses"] for result in tensor]


@pytest.mark.torch
@pytest.mark.parametrize("layout", ["tensor", "interleaved"])
def test_each_part_is_timed_once_in_each_pass_of_a_window(layout: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(layout)
    chunks, layers, recomputed = (1, 2, True) if layout == "tensor" else (2, 1, False)
    for rank, result in enumerate(results):
        found = records(result)
        first, last = (rank < 2, rank >= 2) if layout == "tensor" else (rank == 0, rank == 1)
        parts = {
            (LayerSite(site), layer, chunk)
            for site in (2, 3, 4, 5)
            for layer in range(layers)
            for chunk in range(chunks)
        }
        ends = {(LayerSite.EMBEDDING, NO_LAYER, 0)} if first else set()
        if last:
            ends |= {(site, NO_LAYER, chunks - 1) for site in (LayerSite.FINAL_NORM, LayerSite.LOSS)}
        for kind in LAYER_KINDS:
            own = found[found["kind"] == kind]
            times = Counter(
                (int(r["step"]), int(r["microbatch"]), LayerSite(int(r["ordinal"])), int(r["layer"]), int(r["chunk"]))
                for r in own
            )
            again = 2 if recomputed and kind is RecordKind.LAYER_FORWARD else 1
            expected = Counter(
                {
                    (step, microbatch, *part): again if part in parts else 1
                    for step in IN_WINDOW
                    for microbatch in range(MICROBATCHES)
                    for part in parts | ends
                }
            )
            assert times == expected, (rank, kind.name)


def spans_of(found: Any, kinds: Any) -> list[tuple[int, int]]:
    chosen = found[np.isin(found["kind"], [int(kind) for kind in kinds])]
    ends = chosen["start_ns"] + chosen["duration"].astype(np.uint64) * 8
    return sorted(zip(chosen["start_ns"].tolist(), ends.tolist(), strict=True), key=lambda span: (span[0], -span[1]))


@pytest.mark.torch
@pytest.mark.parametrize("layout", ["tensor", "interleaved"])
def test_parts_lie_within_their_pass_nested_or_apart(layout: str, request: pytest.FixtureRequest) -> None:
    for result in request.getfixturevalue(layout):
        found = records(result)
        inside = spans_of(found, LAYER_KINDS + TENSOR_KINDS)
        passes = spans_of(found, PASS_KINDS)
        for start, end in inside:
            assert any(begin <= start and end <= finish + 8 for begin, finish in passes)
        stack: list[int] = []
        for start, end in inside:
            while stack and stack[-1] <= start + 8:
                stack.pop()
            assert not stack or end <= stack[-1] + 8
            stack.append(end)


@pytest.mark.torch
def test_tensor_collectives_match_between_ranks(tensor: list[dict[str, Any]]) -> None:
    """The first of each pass in every step, and all of them in windows."""
    for pair in ((0, 1), (2, 3)):
        keys = []
        for rank in pair:
            found = records(tensor[rank])
            own = found[np.isin(found["kind"], [int(kind) for kind in TENSOR_KINDS])]
            keys.append(Counter((int(r["kind"]), int(r["step"]), int(r["ordinal"]), int(r["aux"])) for r in own))
        assert keys[0] == keys[1]
        assert set(keys[0].values()) == {1}
        steps = Counter(step for _, step, _, _ in keys[0])
        outside = set(range(STEPS)) - set(IN_WINDOW)
        assert all(steps[step] == 2 * MICROBATCHES for step in outside), "one of each forward and backward pass"
        assert all(steps[step] > 8 * MICROBATCHES for step in IN_WINDOW)
        assert all(aux > 0 for _, _, _, aux in keys[0])


@pytest.mark.torch
def test_nothing_is_left_of_a_window_that_is_over(tensor: list[dict[str, Any]]) -> None:
    for result in tensor:
        found = records(result)
        layers = found[np.isin(found["kind"], [int(kind) for kind in LAYER_KINDS])]
        assert set(layers["step"].tolist()) == set(IN_WINDOW)


@pytest.mark.torch
def test_files_of_ranks_are_read_back_as_the_spans_of_their_rings(
    tensor: list[dict[str, Any]], trace_dir: pathlib.Path
) -> None:
    job = read_rank_files({path.name: json.loads(path.read_bytes()) for path in sorted(trace_dir.iterdir())})
    assert [rank.rank for rank in job.ranks] == [0, 1, 2, 3]
    both = (*PASS_KINDS, *TENSOR_KINDS, RecordKind.OPTIMIZER, RecordKind.STEP)
    for rank, result in zip(job.ranks, tensor, strict=True):
        ring = records(result)
        ring = ring[np.isin(ring["step"], IN_WINDOW)]
        for kind in both:
            there, here = rank.records[rank.records["kind"] == kind], ring[ring["kind"] == kind]
            assert sorted(there["duration"].tolist()) == sorted(here["duration"].tolist()), kind.name
    origins = {
        int(min(result_records["start_ns"])) - int(min(rank.records["start_ns"]))
        for rank, result_records in zip(job.ranks, (ring_steps(result) for result in tensor), strict=True)
    }
    assert max(origins) - min(origins) < 5_000_000, "one clock, read by each rank"
    sent, received = Counter[Any](), Counter[Any]()
    for rank in job.ranks:
        pairs = {slot: c.members for slot, c in enumerate(rank.communicators) if c.kind == "p2p"}
        for record in rank.records:
            message = (pairs.get(int(record["comm"])), int(record["step"]), int(record["ordinal"]), int(record["aux"]))
            sent[message] += int(record["kind"]) == RecordKind.SEND_POST
            received[message] += int(record["kind"]) == RecordKind.RECV_POST
    assert +sent == +received
    assert len(+sent) == len(IN_WINDOW) * 2 * 2 * MICROBATCHES


def ring_steps(result: dict[str, Any]) -> np.ndarray:
    """Return the STEP records of the windows in a ring."""
    found = records(result)
    chosen: np.ndarray = found[(found["kind"] == RecordKind.STEP) & np.isin(found["step"], IN_WINDOW)]
    return chosen
