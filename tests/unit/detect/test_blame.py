"""Slowdowns of cells by replay, and the blame of a step: the injected fault is the culprit, and blame adds up."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_graph import plain_mixed_lengths_s, plain_usual_weights

from megatronapp_analyzer.graph import usual
from megatronapp_analyzer.graph.blame import StepBlame, find_blame
from megatronapp_analyzer.graph.build import StepGraph, build
from megatronapp_analyzer.graph.edges import Seconds
from megatronapp_analyzer.graph.links import deliveries_of
from megatronapp_analyzer.graph.replay import MIXED_AT_ONCE, makespan_s, mixed_lengths_s, replay
from megatronapp_analyzer.graph.usual import Cells, PeerSet, Slowdowns, find_slowdowns, usual_weights
from megatronapp_analyzer.hub.blame.stored_step import default_peers
from megatronapp_analyzer.hub.http.megascan.views import blame_view, slowdowns_view
from megatronapp_analyzer.hub.http.timeline.views import timeline
from megatronapp_analyzer.hub.ingest.digest import METRICS, StepDigest
from megatronapp_analyzer.hub.ingest.step_graphs import StepGraphs
from megatronapp_analyzer.hub.ingest.store import StoredStep
from megatronapp_analyzer.hub.state.answer_cache import DEFERRED_S, MAX_WAITING, REST_FACTOR, AnswerCache
from megatronapp_analyzer.model import JobLayout, StepRecords
from megatronapp_common.trace import RecordKind
from megatronapp_common.web.problems import HttpError

Graphs = Callable[..., list[StepGraph]]
FAULTS: dict[str, tuple[dict[str, int], dict[str, Any], tuple[int, ...]]] = {
    "compute": ({"pp": 4, "dp": 2}, {"rank": 5, "kind": "compute", "factor": 1.5}, (5,)),
    "compute of a tensor group": ({"pp": 2, "tp": 2, "dp": 2}, {"rank": 5, "kind": "compute", "factor": 1.5}, (4, 5)),
    "host": ({"pp": 2, "dp": 2}, {"rank": 1, "kind": "host", "factor": 3.0}, (1,)),
    "link": ({"pp": 2, "dp": 2}, {"rank": 1, "peer": 3, "kind": "link", "factor": 4.0}, (3, 1)),
}


@pytest.fixture
def steps_of(sim: ModuleType) -> Callable[..., list[StepRecords]]:
    def steps(layout: JobLayout, *faults: dict[str, Any], count: int = 6, seed: int = 3) -> list[StepRecords]:
        job = sim.Job(
            layout=layout, microbatches=8, noise=sim.GPU, faults=tuple(sim.Fault(**fault) for fault in faults)
        )
        return list(sim.Simulator(job, seed).steps(1, count))

    return steps


@pytest.fixture
def graphs_of(steps_of: Callable[..., list[StepRecords]]) -> Graphs:
    def graphs(layout: JobLayout, *faults: dict[str, Any], **how: int) -> list[StepGraph]:
        units = Cells.of(layout).of_rank
        return [build(view, unit_of_rank=units) for view in steps_of(layout, *faults, **how)]

    return graphs


def blamed(graphs: list[StepGraph], layout: JobLayout) -> StepBlame:
    ideal = usual_weights(graphs, layout, PeerSet.WORK)[-1]
    return find_blame(graphs[-1], ideal, Cells.of(layout).of_rank)


def cell_of(found: Slowdowns, rank: int) -> float:
    return float(found.cells_C[found.cells.of_rank[rank]])


@pytest.mark.parametrize("case", FAULTS)
def test_the_injected_fault_is_the_culprit_and_its_cell_the_slowest(graphs_of: Graphs, case: str) -> None:
    grid, fault, ranks = FAULTS[case]
    layout = JobLayout.grid(**grid)
    graphs = graphs_of(layout, fault)

    found = find_slowdowns(graphs, layout, PeerSet.WORK)
    assert cell_of(found, fault["rank"]) == pytest.approx(found.slowdown, rel=0.02)
    assert found.slowdown > 1.15
    others = np.delete(found.cells_C, found.cells.of_rank[fault["rank"]])
    assert others.max() < 1.01
    assert found.slowest_fraction == pytest.approx(1, abs=0.05)

    blame = blamed(graphs, layout)
    assert blame.items[0].ranks == ranks
    assert str(blame.items[0].cause) == fault["kind"]
    assert blame.items[0].seconds > 0.95 * blame.lost_s
    assert set(graphs[-1].spans["rank"][blame.culprit_spans]) <= {*ranks}
    assert len(blame.culprit_spans) > 0


def test_a_large_step_is_replayed_with_few_scenarios_at_a_time_to_the_same_numbers(
    graphs_of: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = JobLayout.grid(pp=2, dp=2)
    graphs = graphs_of(layout, FAULTS["compute"][1] | {"rank": 2}, count=2)
    ideal = usual_weights(graphs, layout, PeerSet.WORK)[-1]
    numbers: list[int] = []

    def replayer(graph: StepGraph, weights: Seconds) -> Seconds:
        times = replay(graph, weights)
        numbers.append(max(weights.size, times.size))
        return times

    def answer() -> StepBlame:
        return find_blame(graphs[-1], ideal, Cells.of(layout).of_rank, replayer)

    blame = answer()
    largest, most = max(numbers), 3 * len(graphs[-1].edges.weight)
    monkeypatch.setattr("megatronapp_analyzer.graph.replay.MAX_NUMBERS", most)
    numbers.clear()
    blame_again = answer()
    assert max(numbers) <= most < largest
    assert blame_again.items == blame.items and (blame_again.path == blame.path).all()


@pytest.mark.parametrize("peers", PeerSet)
@pytest.mark.parametrize("least_table", [0, usual._LEAST_TABLE])
def test_slowdowns_are_those_of_the_plain_form(
    graphs_of: Graphs, peers: PeerSet, least_table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usual, "_LEAST_TABLE", least_table)
    layout = JobLayout.grid(pp=2, vpp=2, dp=3)
    graphs = graphs_of(layout, FAULTS["compute"][1] | {"rank": 2}, count=2)
    for weights, plain in zip(
        usual_weights(graphs, layout, peers), plain_usual_weights(graphs, layout, peers), strict=True
    ):
        np.testing.assert_allclose(weights, plain, rtol=1e-12 if peers is PeerSet.POOLED else 0)  # sums of means
    found = find_slowdowns(graphs, layout, peers)
    plainly = find_slowdowns(graphs, layout, peers, replayer=plain_mixed_lengths_s)
    assert np.array_equal(found.cells_CT, plainly.cells_CT)
    assert found.kinds == plainly.kinds and len(found.kinds) > 0
    assert found.links == plainly.links and len(found.links) > 0
    assert found.launch_ratio == plainly.launch_ratio
    assert (found.slowest_fraction, found.last_stage_fraction) == (
        plainly.slowest_fraction,
        plainly.last_stage_fraction,
    )
    assert np.array_equal(found.recorded_T, plainly.recorded_T) and np.array_equal(found.ideal_T, plainly.ideal_T)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), scenarios=st.integers(1, MIXED_AT_ONCE))
def test_mixed_steps_are_as_long_as_in_the_plain_form(graphs_of: Graphs, seed: int, scenarios: int) -> None:
    (graph,) = graphs_of(JobLayout.grid(pp=2, dp=2), FAULTS["compute"][1] | {"rank": 2}, count=1)
    random = np.random.default_rng(seed)
    recorded_in = random.integers(0, 256, len(graph.edges.weight), np.uint8)
    ideal = random.uniform(0, 0.01, len(graph.edges.weight))
    found = mixed_lengths_s(graph, ideal, recorded_in, scenarios)
    assert np.array_equal(found, plain_mixed_lengths_s(graph, ideal, recorded_in, scenarios))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    grid=st.sampled_from([{"dp": 3}, {"pp": 3, "dp": 2}, {"pp": 2, "vpp": 2, "dp": 2}, {"pp": 2, "tp": 2}]),
    factors=st.lists(st.floats(1, 2), min_size=2, max_size=2),
    seed=st.integers(0, 1000),
    peers=st.sampled_from(PeerSet),
)
def test_blame_sums_to_the_time_lost(
    graphs_of: Graphs, grid: dict[str, int], factors: list[float], seed: int, peers: PeerSet
) -> None:
    layout = JobLayout.grid(**grid)
    faults = [{"rank": rank, "kind": "compute", "factor": factor} for rank, factor in enumerate(factors)]
    graphs = graphs_of(layout, *faults, count=3, seed=seed)
    ideal = usual_weights(graphs, layout, peers)

    blame = find_blame(graphs[-1], ideal[-1], Cells.of(layout).of_rank)
    assert blame.recorded_s == pytest.approx(float(makespan_s(graphs[-1], replay(graphs[-1], graphs[-1].edges.weight))))
    assert blame.ideal_s == pytest.approx(float(makespan_s(graphs[-1], replay(graphs[-1], ideal[-1]))))
    assert blame.blamed_s == pytest.approx(blame.lost_s, abs=0.01 * blame.recorded_s)


def test_a_second_slow_rank_that_nothing_waits_for_has_a_slowdown_and_no_blame(graphs_of: Graphs) -> None:
    layout = JobLayout.grid(dp=5)
    slow = [{"rank": rank, "kind": "compute", "factor": factor} for rank, factor in ((1, 1.5), (3, 1.4))]
    graphs = graphs_of(layout, *slow)
    found, blame = find_slowdowns(graphs, layout, PeerSet.WORK), blamed(graphs, layout)
    assert (found.cells_C > 1.3).tolist() == [False, True, False, True, False]
    assert blame.items[0].ranks == (1,)
    assert all(item.seconds < 0.05 * blame.lost_s for item in blame.items[1:])


def test_victims_wait_for_the_culprit_or_for_each_other(graphs_of: Graphs) -> None:
    layout = JobLayout.grid(pp=4)
    graphs = graphs_of(layout, {"rank": 3, "kind": "compute", "factor": 2.0, "from_step": 6}, count=6)
    blame = blamed(graphs, layout)
    distance = {victim.rank: victim.distance for victim in blame.victims}
    assert blame.items[0].ranks == (3,)
    assert distance[2] == 1
    for victim in blame.victims:
        assert victim.distance == 1 + (0 if victim.waited_for == 3 else distance[victim.waited_for])
    spans = graphs[-1].spans
    assert 3 not in set(spans["rank"][blame.victim_spans])
    waits = {RecordKind.RECV_WAIT, RecordKind.GRAD_NORM, RecordKind.GRAD_REDUCE}
    assert {RecordKind(kind) for kind in spans["kind"][blame.victim_spans]} <= waits


@pytest.mark.parametrize("case", ["link", "compute", "host"])
def test_a_slow_link_has_the_slowdown_of_the_job_and_all_other_links_have_none(graphs_of: Graphs, case: str) -> None:
    grid, fault, ranks = FAULTS[case]
    layout = JobLayout.grid(**grid)
    found = find_slowdowns(graphs_of(layout, fault), layout, PeerSet.WORK)
    slow = {link: slowdown for link, slowdown in found.links.items() if slowdown > 1.01}
    assert slow == ({ranks: pytest.approx(found.slowdown, rel=0.02)} if case == "link" else {})
    assert list(found.links.values()) == sorted(found.links.values(), reverse=True)


def test_the_links_with_the_most_time_beyond_the_usual_are_replayed(graphs_of: Graphs) -> None:
    layout = JobLayout.grid(pp=4, dp=4)
    slow = [{"rank": rank, "peer": peer, "kind": "link", "factor": 2.0} for rank, peer in ((5, 1), (2, 6))]
    graphs = graphs_of(layout, *slow)
    every, two = (find_slowdowns(graphs, layout, PeerSet.WORK, max_links=most).links for most in (64, 2))
    assert two == {link: every[link] for link in ((1, 5), (6, 2))}
    assert find_slowdowns(graphs, layout, PeerSet.WORK, max_links=0).links == {}


def test_the_launch_ratio_is_the_step_over_the_step_without_time_between_spans(graphs_of: Graphs) -> None:
    layout = JobLayout.grid()
    (graph,) = graphs_of(layout, FAULTS["host"][1] | {"rank": 0}, count=1)
    length_s = float(graph.end_s.max() - graph.start_s.min())
    spans_s = float((graph.end_s - graph.start_s).sum())
    assert length_s / spans_s > 1.3
    ratio = find_slowdowns([graph], layout, PeerSet.POOLED).launch_ratio
    assert ratio == pytest.approx(length_s / spans_s)


@pytest.mark.parametrize(("case", "is_host"), [("host", True), ("compute", False), ("link", False)])
def test_launch_delays_are_those_of_hosts(graphs_of: Graphs, case: str, is_host: bool) -> None:
    grid, fault, _ = FAULTS[case]
    layout = JobLayout.grid(**grid)
    found = find_slowdowns(graphs_of(layout, fault), layout, PeerSet.WORK)
    assert found.launch_ratio == pytest.approx(found.slowdown if is_host else 1, rel=0.02)


def test_pooled_peers_take_a_heavy_stage_for_slow_and_equal_work_does_not(sim: ModuleType) -> None:
    layout = JobLayout.grid(pp=2, dp=2)
    job = sim.Job(layout=layout, noise=sim.QUIET, stage_weight=(1.0, 1.5))
    graphs = [build(view) for view in sim.Simulator(job, 1).steps(1, 3)]
    pooled, work = (find_slowdowns(graphs, layout, peers) for peers in (PeerSet.POOLED, PeerSet.WORK))
    assert pooled.last_stage_fraction is not None
    assert pooled.last_stage_fraction > 0.9
    assert pooled.slowdown > 1.1
    assert work.slowdown == pytest.approx(1, abs=0.01)


def test_deliveries_name_the_slow_pair(graphs_of: Graphs) -> None:
    layout = JobLayout.grid(pp=2, dp=2)
    pairs = deliveries_of(graphs_of(layout, FAULTS["link"][1]))
    slowest = int(np.argmax(pairs.seconds))
    assert (pairs.source[slowest], pairs.destination[slowest]) == (3, 1)
    assert pairs.count[slowest] == 6 * 8
    assert np.sort(pairs.seconds)[-2] < 0.1 * pairs.seconds[slowest]


def stored(view: StepRecords, offsets_ns: list[int]) -> StoredStep:
    """Return a step as the store has it; `offsets_ns` bring the clock of each rank back to that of the simulator."""
    records = view.records.copy()
    records["start_ns"] = records["start_ns"] - np.array(offsets_ns)[records["rank"]].astype(np.uint64)
    values = np.zeros((len(METRICS), len(offsets_ns)), np.float32)
    digest = StepDigest(
        attempt=0,
        step=view.step,
        start_real_ns=0,
        duration_ns=view.end_ns - view.start_ns,
        complete=True,
        values=values,
    )
    return StoredStep(
        view=dataclasses.replace(view, records=records), digest=digest, offsets_ns=np.array(offsets_ns, np.int64)
    )


def test_views_show_cells_links_and_spans_of_the_timeline(
    steps_of: Callable[..., list[StepRecords]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = JobLayout.grid(pp=2, dp=2, ranks_per_node=2)
    fault = {"rank": 2, "kind": "compute", "factor": 2.0, "from_step": 4}
    steps = [stored(view, [0, 0, 5_000_000, 5_000_000]) for view in steps_of(layout, fault)]
    peers, graphs = default_peers(layout), StepGraphs()

    found = slowdowns_view(0, layout, steps, peers, graphs)
    assert found.steps == [1, 2, 3, 4, 5, 6]
    (slow,) = [cell for cell in found.cells if cell.ranks == [2]]
    assert (slow.stage, slow.replica) == (1, 0)
    assert [value is not None and value > 1.3 for value in slow.steps] == [False] * 3 + [True] * 3
    assert {(link.source, link.destination) for link in found.links} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert all(link.crosses_nodes for link in found.links)
    assert all(link.slowdown is not None and link.slowdown < 1.01 for link in found.links)
    assert found.launch_ratio is not None and 1 < found.launch_ratio < 1.01

    blame = blame_view(steps[-1], steps[:-1], layout, peers, graphs)
    assert blame is not None
    assert (blame.blamed[0].ranks, blame.blamed[0].cause) == ([2], "compute")
    columns = timeline(steps[-1], layout)
    assert {columns.rank[span] for span in blame.culprit_spans} == {2}
    assert {columns.kind_names[columns.kind[span]] for span in blame.culprit_spans} == {"forward", "backward"}
    assert set(blame.culprit_spans) <= set(blame.path)
    assert blame.path_ranks == [columns.rank[span] for span in blame.path]

    monkeypatch.setattr("megatronapp_analyzer.hub.http.megascan.views.SHOWN_SPANS", 3)
    few = blame_view(steps[-1], steps[:-1], layout, peers, graphs)
    assert few is not None
    longest = sorted(blame.path, key=lambda span: columns.duration_ns[span], reverse=True)[:3]
    assert few.path == [span for span in blame.path if span in longest]


def test_without_whole_steps_nothing_is_slow() -> None:
    view = slowdowns_view(0, None, [], PeerSet.WORK, StepGraphs())
    assert (view.slowdown, view.cells, view.links, view.launch_ratio) == (None, [], [], None)


def test_views_show_the_worst_link_first_and_which_links_were_not_replayed(
    steps_of: Callable[..., list[StepRecords]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = JobLayout.grid(pp=2, dp=4)
    slow = [{"rank": rank, "peer": rank + 4, "kind": "link", "factor": factor} for rank, factor in ((1, 2.0), (2, 1.5))]
    steps = [stored(view, [0] * 8) for view in steps_of(layout, *slow, count=3)]
    monkeypatch.setattr("megatronapp_analyzer.hub.http.megascan.views.LEAST_LINKS", 2)
    monkeypatch.setattr("megatronapp_analyzer.hub.http.megascan.views.EDGE_REPLAYS", 0)
    view = slowdowns_view(0, layout, steps, PeerSet.WORK, StepGraphs())
    assert [(link.source, link.destination) for link in view.links[:2]] == [(5, 1), (6, 2)]
    assert [link.slowdown is not None for link in view.links] == [True] * 2 + [False] * 6
    assert [link.seconds for link in view.links[2:]] == sorted((link.seconds for link in view.links[2:]), reverse=True)


def test_large_jobs_are_shown_in_blocks_with_their_slowest_cell(
    steps_of: Callable[..., list[StepRecords]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = JobLayout.grid(pp=2, dp=4)
    monkeypatch.setattr("megatronapp_analyzer.hub.http.megascan.views.SHOWN_CELLS", 4)
    fault = {"rank": 6, "kind": "compute", "factor": 2.0}
    steps = [stored(view, [0] * 8) for view in steps_of(layout, fault, count=3)]
    view = slowdowns_view(0, layout, steps, PeerSet.WORK, StepGraphs())
    assert view.replicas_per_cell == 2
    assert [(cell.stage, cell.replica, cell.ranks) for cell in view.cells] == [
        (0, 0, [0, 1]),
        (0, 2, [2, 3]),
        (1, 0, [4, 5]),
        (1, 2, [6, 7]),
    ]
    assert max(view.cells, key=lambda cell: cell.slowdown or 0).ranks == [6, 7]


class SlowAnswers:
    """Answers that each take SPENT_S of a processor in twice the time; only they and sleeps move the clocks."""

    SPENT_S = 3.0

    def __init__(self) -> None:
        self.now = self.spent = 0.0
        self.begun: list[float] = []
        self.cache = AnswerCache(lambda: self.now, lambda: self.spent, self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def compute(self) -> int:
        self.begun.append(self.now)
        self.now += 2 * self.SPENT_S
        self.spent += self.SPENT_S
        return len(self.begun)


@pytest.mark.asyncio
async def test_an_answer_that_took_long_is_computed_again_only_after_a_rest() -> None:
    slow = SlowAnswers()
    assert [await slow.cache.answer(("a",), version, slow.compute) for version in (1, 1, 2)] == [1, 1, 1]
    slow.now += slow.SPENT_S * REST_FACTOR
    assert await slow.cache.answer(("a",), 1, slow.compute) == 1
    assert await slow.cache.answer(("a",), 2, slow.compute) == 2
    slow.cache.close()


@pytest.mark.asyncio
async def test_the_first_answers_are_given_at_once_and_few_requests_wait_for_later_ones() -> None:
    slow = SlowAnswers()
    answers = await asyncio.gather(
        *(slow.cache.answer((number,), 1, slow.compute) for number in range(MAX_WAITING + 3)), return_exceptions=True
    )
    assert answers[: MAX_WAITING + 1] == list(range(1, MAX_WAITING + 2))
    rest_s = slow.SPENT_S * REST_FACTOR
    at_once = 1 + int(DEFERRED_S // rest_s)
    assert slow.begun[:at_once] == [2 * slow.SPENT_S * number for number in range(at_once)]
    assert slow.begun[at_once + 2 :] == pytest.approx([begun + rest_s for begun in slow.begun[at_once + 1 : -1]])
    for refused in answers[MAX_WAITING + 1 :]:
        assert isinstance(refused, HttpError)
        assert (refused.status, refused.code) == (503, "busy")
        assert refused.retry_s is not None and 1 <= refused.retry_s <= rest_s
    slow.cache.close()


@pytest.mark.asyncio
async def test_requests_that_gave_up_wait_together() -> None:
    """A page that asks again before its answer is there does not fill the queue, and others still get theirs."""
    slow = SlowAnswers()
    first = asyncio.create_task(slow.cache.answer(("a",), 1, slow.compute))
    await asyncio.sleep(0)
    for version in range(2, 2 * MAX_WAITING):
        given_up = asyncio.create_task(slow.cache.answer(("b",), version, slow.compute))
        await asyncio.sleep(0)
        given_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await given_up
    assert await slow.cache.answer(("c",), 1, slow.compute) == 3
    assert (await first, len(slow.begun)) == (1, 3)
    slow.cache.close()
