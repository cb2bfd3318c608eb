"""Causes that look alike in the lengths of passes: memory traffic, links inside a node, slow compute."""

import dataclasses
import math

import numpy as np
import pytest
from detect.faults import parse
from detect.layout import Grid
from detect.noise import GPU
from detect.runner import run
from detect.score import score
from detect.simulation import SimulatedJob
from detect.suite import DetectionCase
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.detect.causes.collective_transfers import transfers_of
from megatronapp_analyzer.detect.causes.compute_cause import PassParts, compute_cause
from megatronapp_analyzer.detect.causes.group_links import GroupLinks
from megatronapp_analyzer.detect.causes.growth import PartBaselines
from megatronapp_analyzer.detect.causes.layer_parts import LayerParts
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.units import Units
from megatronapp_analyzer.model import RANK_RECORD, Cause, Communicator, JobLayout, StepRecords
from megatronapp_common.trace import Flag, LayerSite, RecordKind, pass_ordinal

LAYOUT = JobLayout.grid(tp=2)
NAN = float("nan")
ratios = st.floats(1.0, 4.0)
parts_of_growth = st.one_of(st.just(NAN), st.floats(-0.5, 1.5))


@given(ratio=ratios, growth=st.floats(0.0, 1.4), transfers=parts_of_growth)
def test_an_optimizer_that_grows_like_the_passes_is_no_sign_of_memory(
    ratio: float, growth: float, transfers: float
) -> None:
    alike = PassParts(optimizer=growth * math.log(ratio), transfers=NAN)
    assert compute_cause(ratio, alike, link=Cause.LINK) is Cause.COMPUTE
    both = PassParts(optimizer=alike.optimizer, transfers=transfers)
    assert compute_cause(ratio, both, link=Cause.LINK) in {Cause.COMPUTE, Cause.LINK}


@given(ratio=ratios, optimizer=parts_of_growth, transfers=parts_of_growth)
def test_the_cause_is_the_part_that_grew_most(ratio: float, optimizer: float, transfers: float) -> None:
    parts = PassParts(optimizer=optimizer, transfers=transfers)
    cause = compute_cause(ratio, parts, link=Cause.NODE_LINK)
    grown = {Cause.MEMORY: optimizer, Cause.NODE_LINK: transfers}
    if cause is Cause.COMPUTE:
        assert not any(growth > 1.5 * math.log(ratio) + 0.3 for growth in grown.values())
    else:
        assert grown[cause] > 1.5 * math.log(ratio)
        assert not any(growth > max(grown[cause], 0.3) for growth in grown.values())


def record(rank: int, kind: RecordKind, duration: int, ordinal: int = 0, comm: int = 0) -> np.void:
    row: np.void = np.zeros(1, RANK_RECORD)[0]
    row["rank"], row["kind"], row["duration"], row["ordinal"], row["comm"] = rank, kind, duration, ordinal, comm
    row["start_ns"], row["flags"] = 1000 * (1 + ordinal % 7), Flag.DEVICE_CLOCK
    return row


def test_a_transfer_lasts_as_long_as_on_its_last_member() -> None:
    passes = [pass_ordinal(RecordKind.FORWARD, 0, microbatch, 0) for microbatch in range(3)]
    later = pass_ordinal(RecordKind.FORWARD, 0, 0, 1)
    rows = [
        record(0, RecordKind.TP_REDUCE, length, number) for length, number in zip((900, 40, 30), passes, strict=True)
    ]
    rows += [
        record(1, RecordKind.TP_REDUCE, length, number)
        for length, number in zip((50, 700, 9), passes[:2], strict=False)
    ]
    rows += [record(rank, RecordKind.TP_REDUCE, 5, later) for rank in (0, 1)]
    rows += [record(0, RecordKind.GRAD_REDUCE, 800), record(1, RecordKind.GRAD_REDUCE, 100)]
    rows += [record(2, RecordKind.GRAD_REDUCE, 60)]
    table = {0: Communicator("dp", (0, 1))}
    view = StepRecords(
        attempt=0,
        step=0,
        records=np.array(rows, RANK_RECORD),
        comms={0: table, 1: table, 2: {0: Communicator("dp", (2, 3))}},
    )
    found = transfers_of(view, np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(found.units_s, [40 * 8e-9, NAN])  # the third pass lacks rank 1, the fourth is not first
    assert found.groups == ((0, 1),)
    np.testing.assert_allclose(found.groups_s, [100 * 8e-9])


def nccl_step() -> StepRecords:
    """Return a step of two ranks with the kernels of their collectives, of which the last ends last."""
    table = {0: Communicator("tp", (0, 1)), 1: Communicator("dp", (0, 1))}
    rows = [record(rank, RecordKind.GRAD_REDUCE, 900, comm=1) for rank in (0, 1)]
    passes = [pass_ordinal(RecordKind.FORWARD, 0, microbatch, 0) for microbatch in range(3)]
    rows += [record(rank, RecordKind.TP_REDUCE, 300, number) for rank in (0, 1) for number in passes]
    rows += [
        record(rank, RecordKind.NCCL, 10 * (number + 1) + 500 * (rank == number), number, comm)
        for comm in (1, 0)
        for rank in (0, 1)
        for number in (0, 1)
    ]
    rows.append(rows.pop(11))
    return StepRecords(attempt=0, step=0, records=np.array(rows, RANK_RECORD), comms={0: table, 1: table})


def test_transfers_of_nccl_are_taken_where_they_are_recorded() -> None:
    view = nccl_step()
    found = transfers_of(view, np.array([0, 0]))
    np.testing.assert_allclose(found.units_s, [15 * 8e-9])
    np.testing.assert_allclose(found.groups_s, [30 * 8e-9])
    late = dataclasses.replace(view, records=view.records[:-1])  # the last is written in the next step
    np.testing.assert_allclose(transfers_of(late, np.array([0, 0])).groups_s, [900 * 8e-9])


def test_a_step_measured_by_spans_is_not_compared_with_those_measured_by_nccl() -> None:
    """Spans of collectives last longer than their kernels: what is written late is no slow link."""
    whole = nccl_step()
    late = dataclasses.replace(whole, records=whole.records[:-2])
    links, parts = GroupLinks(LAYOUT, DetectorSettings()), PartBaselines(LAYOUT, Units.of(LAYOUT), DetectorSettings())
    over, grown = [], []
    for step in range(60):
        found = transfers_of(late if step >= 40 and step % 3 else whole, np.array([0, 0]))
        over.append(links.read(found, 1e-4).over.any())
        grown.append(parts.transfers(found, np.ones(1, np.bool_))[0])
    assert not any(over)
    assert np.nanmax(grown) < 0.1


def layers(step: int, norms: dict[int, int], products: dict[int, int]) -> StepRecords:
    """Return a step with details: a norm and an MLP of each rank, with their lengths."""
    rows = [record(rank, RecordKind.LAYER_FORWARD, length, LayerSite.MLP_NORM) for rank, length in norms.items()]
    rows += [record(rank, RecordKind.LAYER_BACKWARD, length, LayerSite.MLP) for rank, length in products.items()]
    return StepRecords(attempt=0, step=step, records=np.array(rows, RANK_RECORD), comms={})


def test_norms_that_grew_more_than_products_are_a_sign_of_memory() -> None:
    parts, healthy = LayerParts(JobLayout.grid(dp=3), DetectorSettings()), np.array([True, False, True])
    parts.read(layers(4, {0: 100, 1: 200, 2: 100}, {0: 1000, 1: 1100, 2: 1000}), healthy)
    assert parts.excess((1,), since=3) == pytest.approx(math.log(2 / 1.1))
    assert parts.excess((0,), since=3) == pytest.approx(0.0)
    assert math.isnan(parts.excess((1,), since=5))
    grown = PassParts(optimizer=NAN, transfers=NAN, layers=parts.excess((1,), since=3))
    assert compute_cause(1.2, grown, link=Cause.LINK) is Cause.MEMORY
    alike = PassParts(optimizer=NAN, transfers=NAN, layers=0.02)
    assert compute_cause(1.2, alike, link=Cause.LINK) is Cause.COMPUTE
    parts.read(layers(9, {}, {}), healthy)  # a step without details is none
    assert parts.excess((1,), since=3) == pytest.approx(math.log(2 / 1.1))


def test_a_rank_without_peers_is_compared_with_its_earlier_windows() -> None:
    parts, healthy = LayerParts(JobLayout.grid(pp=2), DetectorSettings(min_history=2)), np.array([True, True])
    for step in range(3):
        parts.read(layers(step, {0: 100, 1: 300}, {0: 1000, 1: 900}), healthy)
    parts.read(layers(8, {0: 150, 1: 300}, {0: 1000, 1: 900}), healthy)
    assert parts.excess((0,), since=8) == pytest.approx(math.log(1.5))
    assert parts.excess((1,), since=8) == pytest.approx(0.0)


PAIRS = Grid(dp=2, pp=2, ranks_per_worker=4, ranks_per_node=4)
UNITS = Grid(dp=2, tp=2, ranks_per_worker=4, ranks_per_node=4)
APART = Grid(dp=2, tp=2, ranks_per_worker=1, ranks_per_node=1)


@pytest.mark.parametrize(
    ("grid", "fault", "cause"),
    [
        (PAIRS, "memory rank=1 factor=2 from=16", "memory"),
        (PAIRS, "compute rank=1 factor=1.3 optimizer=1.3 from=16", "compute"),
        (PAIRS, "compute rank=1 factor=1.3 from=16", "compute"),
        (PAIRS, "link source=0 target=2 delay=1 from=16", "nvlink-pcie"),
        (UNITS, "collective rank=2 tensor=3 from=16", "nvlink-pcie"),
        (APART, "collective rank=2 tensor=3 from=16", "link"),
        (PAIRS, "collective rank=0 data=20 from=16", "nvlink-pcie"),
    ],
)
def test_each_fault_is_named_with_its_cause(grid: Grid, fault: str, cause: str) -> None:
    faults = parse(fault, grid)
    job = SimulatedJob(grid=grid, noise=GPU, microbatches=4, faults=faults, transfer_part=0.2 * (grid.tp > 1))
    case = DetectionCase(row="causes", layout="", job=job, seed=3, steps=28, faults=faults)
    window = run(case, ["ours"]).windows["ours"]
    total = score([window])
    assert (total.hits, total.false, dict(total.causes)) == (1, 0, {(cause, cause): 1})


def test_a_slow_member_of_a_unit_is_no_slow_link() -> None:
    faults = parse("compute rank=2 factor=1.4 from=16", UNITS)
    job = SimulatedJob(grid=UNITS, noise=GPU, microbatches=4, faults=faults, transfer_part=0.2)
    case = DetectionCase(row="causes", layout="", job=job, seed=4, steps=28, faults=faults)
    named = run(case, ["ours"]).windows["ours"].named
    causes = {verdict.cause for verdicts in named.values() for verdict in verdicts}
    assert causes == {"compute"}


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("link source=4 delay=1", "link"),
        ("link target=4 delay=1", "link"),
        ("link source=0 delay=1", "nvlink-pcie"),
        ("link source=0 target=2 delay=1", "nvlink-pcie"),
        ("link source=2 target=4 delay=1", "link"),
    ],
)
def test_the_true_cause_of_late_messages_is_what_lies_between_their_ranks(text: str, cause: str) -> None:
    """Two stages of two ranks share a node; the messages of rank 4 also go to rank 2, on another node."""
    (fault,) = parse(text, Grid(dp=2, pp=4, ranks_per_node=4))
    assert fault.cause == cause
