"""The reduction of the loss: all ranks of a role meet in it, though its records name the replicas alone."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from trained_steps import as_trained

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_analyzer.graph.blame import StepBlame, find_blame
from megatronapp_analyzer.graph.build import build
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.matching import Collectives, collectives_of
from megatronapp_analyzer.graph.records import CommIndex
from megatronapp_analyzer.graph.usual import Cells, PeerSet, usual_weights
from megatronapp_analyzer.graph.waits import imposed_s
from megatronapp_analyzer.model import RANK_RECORD, Communicator, JobLayout, StepRecords, VerdictState
from megatronapp_common.trace import NO_COMM, RecordKind

Trained = Callable[..., list[StepRecords]]
SLOW_STAGE = 0
GRIDS = ({"pp": 4}, {"pp": 4, "dp": 2}, {"pp": 4, "dp": 2, "tp": 2})


@pytest.fixture
def trained(sim: ModuleType) -> Trained:
    def steps(layout: JobLayout, *faults: dict[str, Any], first: int = 1, count: int = 6) -> list[StepRecords]:
        job = sim.Job(
            layout=layout, microbatches=8, noise=sim.GPU, faults=tuple(sim.Fault(**fault) for fault in faults)
        )
        return [as_trained(view, layout) for view in sim.Simulator(job, 3).steps(first, count)]

    return steps


def slow_stage(layout: JobLayout, **how: Any) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "kind": "compute", "factor": 1.5, **how}
        for rank, stage in enumerate(layout.stages)
        if stage == SLOW_STAGE
    ]


def blame_of(views: list[StepRecords], layout: JobLayout, peers: PeerSet) -> StepBlame:
    units = Cells.of(layout).of_rank
    graphs = [build(view, unit_of_rank=units) for view in views]
    return find_blame(graphs[-1], usual_weights(graphs, layout, peers)[-1], units)


def losses_of(view: StepRecords) -> Collectives:
    """Return the collectives of a step without those that are no reduction of the loss."""
    records = view.records[view.records["kind"] != RecordKind.GRAD_REDUCE]
    records = records[records["kind"] != RecordKind.PARAM_GATHER]
    return MatchedStep(dataclasses.replace(view, records=records)).collectives


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("peers", PeerSet)
def test_no_other_stage_has_blame_for_a_slow_first_stage(
    trained: Trained, grid: dict[str, int], peers: PeerSet
) -> None:
    """The later stages wait for it in the reduction of the loss, in which it arrives last."""
    layout = JobLayout.grid(**grid)
    blame = blame_of(trained(layout, *slow_stage(layout, from_step=6)), layout, peers)
    assert blame.blamed_s == pytest.approx(blame.lost_s, rel=0.01)
    others = [item for item in blame.items if any(layout.stages[rank] != SLOW_STAGE for rank in item.late_ranks)]
    assert {layout.stages[rank] for rank in blame.items[0].ranks} == {SLOW_STAGE}
    assert max(item.seconds for item in others) < 0.02 * blame.lost_s
    assert sum(item.seconds for item in others) < 0.04 * blame.lost_s


def test_the_cost_of_a_slow_first_stage_is_that_of_the_steps(trained: Trained) -> None:
    """A wait in the reduction of the loss that were taken for a transfer would stay in a step without the slowness."""
    layout = JobLayout.grid(pp=4, dp=2, tp=2)
    fault = {"rank": 1, "kind": "compute", "factor": 1.3, "from_step": 12}
    healthy, slow = trained(layout, first=0, count=30), trained(layout, fault, first=0, count=30)
    lost_s = np.mean([view.end_ns - view.start_ns for view in slow[15:]]) * 1e-9
    lost_s -= np.mean([view.end_ns - view.start_ns for view in healthy[15:]]) * 1e-9
    detector = Detector(layout)
    verdicts = [verdict for view in slow for verdict in detector.observe(view)]
    assert {verdict.subject.ranks for verdict in verdicts} == {(1,)}
    assert verdicts[-1].state is VerdictState.CONFIRMED
    assert verdicts[-1].seconds_per_step == pytest.approx(lost_s, rel=0.05)


def test_waits_in_the_reduction_of_the_loss_are_those_of_all_ranks(trained: Trained) -> None:
    layout = JobLayout.grid(pp=4, dp=2)
    (view,) = trained(layout, *slow_stage(layout), count=1)
    waits = imposed_s(MatchedStep(view))
    assert {kind for _, kind in waits} <= {"p2p", "dp", "world"}
    assert {layout.stages[rank] for rank, kind in waits if kind == "world"} == {SLOW_STAGE}
    assert sum(seconds for (_, kind), seconds in waits.items() if kind == "world") > 0


def test_a_rank_that_reported_nothing_does_not_part_the_others(trained: Trained) -> None:
    (view,) = trained(JobLayout.grid(pp=2, dp=2), count=1)
    without = dataclasses.replace(view, records=view.records[view.records["rank"] != 2])
    for step, ranks in ((view, [0, 1, 2, 3]), (without, [0, 1, 3])):
        found = losses_of(step)
        assert (len(found), found.expected.tolist()) == (1, [len(ranks)])
        assert found.complete.all()


def test_with_a_lost_record_those_of_each_table_met(trained: Trained) -> None:
    (view,) = trained(JobLayout.grid(pp=2, dp=2), count=1)
    lost = (view.records["rank"] == 3) & (view.records["kind"] == RecordKind.LOSS_REDUCE)
    found = losses_of(dataclasses.replace(view, records=view.records[~lost]))
    assert found.expected.tolist() == [2, 2]
    assert found.complete.tolist() == [True, False]


def test_in_a_loss_that_the_last_stage_reduces_alone_its_replicas_meet(trained: Trained) -> None:
    """So it is in files of MegatronApp."""
    layout = JobLayout.grid(pp=2, dp=2)
    (view,) = trained(layout, count=1)
    others = (view.records["rank"] < 2) & (view.records["kind"] == RecordKind.LOSS_REDUCE)
    found = losses_of(dataclasses.replace(view, records=view.records[~others]))
    assert found.expected.tolist() == [2]
    assert found.complete.all()


FORWARD, BACKWARD = (0, 1), (2, 3, 4, 5)
ROLES = {
    **{rank: {0: Communicator("dp", FORWARD), 1: Communicator("p2p", (rank, 2))} for rank in FORWARD},
    2: {0: Communicator("dp", (2, 4)), 1: Communicator("mp", (2, 3)), 2: Communicator("p2p", (0, 2))},
    3: {0: Communicator("dp", (3, 5)), 1: Communicator("mp", (2, 3))},
    4: {0: Communicator("dp", (2, 4)), 1: Communicator("mp", (4, 5))},
    5: {0: Communicator("dp", (3, 5)), 1: Communicator("mp", (4, 5))},
}


def losses(ranks: list[int], slot: int = 0, ordinals: tuple[int, ...] = (0,)) -> StepRecords:
    records = np.zeros(len(ranks) * len(ordinals), RANK_RECORD)
    records["rank"], records["ordinal"] = np.repeat(ranks, len(ordinals)), np.tile(ordinals, len(ranks))
    records["start_ns"], records["duration"] = 1000 * (1 + records["ordinal"]), 10
    records["kind"], records["comm"] = RecordKind.LOSS_REDUCE, slot
    return StepRecords(attempt=0, step=0, records=records, comms=ROLES)


def members_of(view: StepRecords) -> list[tuple[int, ...]]:
    step = MatchedStep(view)
    found, ranks = step.collectives, step.spans["rank"]
    return [tuple(sorted(ranks[part].tolist())) for part in np.split(found.record, found.begin[1:-1])]


def test_ranks_of_each_role_meet_apart() -> None:
    every = [*FORWARD, *BACKWARD]
    assert sorted(members_of(losses(every))) == [FORWARD, BACKWARD]
    assert sorted(members_of(losses(every, ordinals=(0, 1)))) == [FORWARD, FORWARD, BACKWARD, BACKWARD]
    assert sorted(members_of(losses(every, slot=NO_COMM))) == [FORWARD, BACKWARD]


def test_a_role_with_a_lost_record_does_not_part_the_other() -> None:
    """Rank 5 has the second reduction only."""
    view = losses([*FORWARD, *BACKWARD], ordinals=(0, 1))
    lost = (view.records["rank"] == 5) & (view.records["ordinal"] == 0)
    found = members_of(dataclasses.replace(view, records=view.records[~lost]))
    assert sorted(found) == sorted([FORWARD, FORWARD, (2, 4), (2, 4), (3,), (3, 5)])


def test_ranks_without_a_table_or_without_a_group_do_not_meet() -> None:
    alone = dataclasses.replace(losses([0, 1, 7], slot=NO_COMM), comms={0: {}, 1: {0: Communicator("p2p", (0, 1))}})
    assert len(MatchedStep(alone).collectives) == 0
    assert CommIndex({}).worlds(np.array([-1, 0, 7])).tolist() == [-1, -1, -1]


def test_the_tables_alone_are_what_clocks_of_devices_are_checked_by() -> None:
    """All members of a part of a collective are in it at once, too, and a node has such parts."""
    view = losses(list(BACKWARD))
    found = collectives_of(view.records, CommIndex(view.comms))
    assert np.diff(found.begin).tolist() == [2, 2]


def test_a_world_that_tables_list_has_no_second_number() -> None:
    world = Communicator("world", (0, 1, 2))
    index = CommIndex({rank: {0: world, 1: Communicator("p2p", (0, 1))} for rank in range(3)})
    assert index.worlds(np.arange(3)).tolist() == [0, 0, 0]
    assert index.members == [world, Communicator("p2p", (0, 1))]
