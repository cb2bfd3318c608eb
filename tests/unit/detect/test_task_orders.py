"""Verdicts about jobs whose ranks run their tasks in the order in which inputs arrive, with weights apart."""

import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatronapp_analyzer.graph.build import build
from megatronapp_analyzer.graph.replay import makespan_s, replay
from megatronapp_analyzer.graph.waits import attribute
from megatronapp_analyzer.model import RANK_RECORD, Communicator, JobLayout, StepRecords
from megatronapp_common.trace import NO_COMM, NO_MICROBATCH, RecordKind
from megatronapp_trainer.pipeline.planning.orders import interleaved
from megatronapp_trainer.pipeline.planning.policies import PlanGuided, Static
from megatronapp_trainer.pipeline.planning.simulator import Simulation, simulate
from megatronapp_trainer.pipeline.planning.tasks import Placement, Task, TaskKind

LAYOUT = JobLayout.grid(dp=2, pp=2)
PLACEMENT = Placement(2)
MICROBATCHES = 8
TASK_S = 20e-3
LATE_S = 7 * TASK_S
FIRST_SLOW_STEP = 15
KINDS = {
    TaskKind.FORWARD: RecordKind.FORWARD,
    TaskKind.BACKWARD: RecordKind.BACKWARD,
    TaskKind.WEIGHT: RecordKind.WEIGHT,
}
Row = tuple[int, ...]


class TaskJob:
    """Steps of two replicas of a pipeline, run by the trainer's own policies.

    `factor`: slowness of rank `slow`; `late`: source and destination of which every fourth message takes LATE_S;
    `static`: without passes before their turn.
    """

    def __init__(
        self,
        sim: ModuleType,
        slow: int | None = None,
        factor: float = 1.0,
        *,
        late: tuple[int, int] | None = None,
        static: bool = False,
    ) -> None:
        self._tables = sim.Simulator(sim.Job(layout=LAYOUT), 1)
        self._slow, self._factor, self._late, self._static = slow, factor, late, static
        self._rng = np.random.default_rng(slow or 0)
        self._now = 1000.0

    def steps(self, count: int) -> Iterator[StepRecords]:
        for step in range(count):
            yield self.step(step)

    def step(self, step: int) -> StepRecords:
        runs = {replica: self._simulated(replica, step) for replica in range(2)}
        rows: list[Row] = []
        for rank, at in enumerate(LAYOUT.coordinates):
            rows += self._rows(runs[at.dp], rank, step)
        ends = [runs[at.dp].spans[at.pp][-1].end for at in LAYOUT.coordinates]
        over = max(ends) + 1e-3
        for rank, end in enumerate(ends):
            world = Communicator("world", tuple(range(LAYOUT.world)))
            rows.append(self._row(rank, step, RecordKind.GRAD_NORM, end, over, comm=world))
            rows.append(self._row(rank, step, RecordKind.STEP, 0.0, over))
        self._now += over + 1e-3
        records = np.array(rows, RANK_RECORD)
        return StepRecords(
            attempt=0,
            step=step,
            records=records[np.lexsort((records["start_ns"], records["rank"]))],
            comms=self._tables.comms,
            boot_ids=self._tables.boot_ids(),
            real_time_s=1.7e9 + self._now,
        )

    def _simulated(self, replica: int, step: int) -> Simulation:
        def task_seconds(stage: int, task: Task) -> float:
            slow = step >= FIRST_SLOW_STEP and self._world_rank(replica, stage) == self._slow
            return TASK_S * (self._factor if slow else 1.0) * float(self._rng.uniform(0.95, 1.05))

        def transfer_seconds(stage: int, task: Task) -> float:
            target = PLACEMENT.next_task(stage, task)
            assert target is not None
            pair = self._world_rank(replica, stage), self._world_rank(replica, target.rank)
            late = step >= FIRST_SLOW_STEP and pair == self._late and task.microbatch % 4 == 0
            return LATE_S if late else 1e-4

        orders = [interleaved(PLACEMENT, MICROBATCHES, stage) for stage in range(2)]
        policies = [Static(order) if self._static else PlanGuided(order, cap=4) for order in orders]
        return simulate(
            PLACEMENT,
            MICROBATCHES,
            policies,
            split=not self._static,
            task_seconds=task_seconds,
            transfer_seconds=transfer_seconds,
        )

    def _rows(self, run: Simulation, rank: int, step: int) -> Iterator[Row]:
        at = LAYOUT.coordinates[rank]
        free = 0.0
        for task, start, end in run.spans[at.pp]:
            source = PLACEMENT.previous_task(at.pp, task)
            if source is not None and source.rank != at.pp:
                pair = Communicator("p2p", (self._world_rank(at.dp, source.rank), rank))
                yield self._row(rank, step, RecordKind.RECV_WAIT, free, start, comm=pair, task=task)
            yield self._row(rank, step, KINDS[task.kind], start, end, task=task)
            target = PLACEMENT.next_task(at.pp, task)
            if target is not None and target.rank != at.pp:
                pair = Communicator("p2p", (rank, self._world_rank(at.dp, target.rank)))
                yield self._row(rank, step, RecordKind.SEND_POST, end, end, comm=pair, task=target.task)
            free = end

    def _row(
        self,
        rank: int,
        step: int,
        kind: RecordKind,
        start: float,
        end: float,
        *,
        comm: Communicator | None = None,
        task: Task | None = None,
    ) -> Row:
        slot = NO_COMM if comm is None else self._tables.slot(rank, comm)
        ordinal = 0 if task is None or comm is None else KINDS[task.kind] << 24 | task.microbatch
        microbatch = NO_MICROBATCH if task is None else task.microbatch
        begin_ns = self._tables.local_ns(rank, self._now + start)
        return (begin_ns, int((end - start) * 1e9) // 8, step, ordinal, 0, slot, microbatch, int(kind), 0, 0, 0, rank)

    @staticmethod
    def _world_rank(replica: int, stage: int) -> int:
        places = [(at.dp, at.pp) for at in LAYOUT.coordinates]
        return places.index((replica, stage))


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_rank_is_named_whose_peers_fill_their_waits(
    sim: ModuleType, judge: Callable[..., Any], slow: int
) -> None:
    run = judge(LAYOUT, TaskJob(sim, slow, 2.0).steps(30))
    assert run.subjects == {("rank", (slow,), "compute")}
    assert run.first_step() > FIRST_SLOW_STEP


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pair", [(0, 2), (2, 0)])
def test_a_late_link_is_named_although_few_passes_wait_for_it(
    sim: ModuleType, judge: Callable[..., Any], pair: tuple[int, int], static: bool
) -> None:
    run = judge(LAYOUT, TaskJob(sim, late=pair, static=static).steps(30))
    assert run.subjects == {("link", pair, "link")}
    assert run.first_step() > FIRST_SLOW_STEP


def test_nothing_is_named_where_nothing_is_late(sim: ModuleType, judge: Callable[..., Any]) -> None:
    assert judge(LAYOUT, TaskJob(sim).steps(30)).verdicts == []


def test_silence_where_no_rank_is_slow(sim: ModuleType, judge: Callable[..., Any]) -> None:
    assert not judge(LAYOUT, TaskJob(sim, 0, 1.0).steps(30)).verdicts


def test_waits_are_attributed_to_the_slow_rank_and_the_replay_is_the_step(sim: ModuleType) -> None:
    view = TaskJob(sim, 1, 2.0).step(FIRST_SLOW_STEP)
    graph = build(view)
    assert makespan_s(graph, replay(graph, graph.edges.weight)) == pytest.approx(
        float(graph.end_s.max() - graph.start_s.min())
    )
    lost = attribute(graph).imposed_by((1,))
    others = sum(sum(attribute(graph).imposed_by((rank,)).values()) for rank in (0, 2, 3))
    assert sum(lost.values()) > 2 * others


def test_weights_count_as_compute(sim: ModuleType) -> None:
    from megatronapp_analyzer.detect.features import extract

    view = TaskJob(sim, 0, 1.0).step(0)
    assert extract(view, LAYOUT).passes_s == pytest.approx(np.full(4, 3 * TASK_S), rel=0.05)
    without = dataclasses.replace(view, records=view.records[view.records["kind"] != RecordKind.WEIGHT])
    assert extract(without, LAYOUT).passes_s == pytest.approx(np.full(4, 2 * TASK_S), rel=0.05)
