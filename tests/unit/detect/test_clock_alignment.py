"""Offsets between nodes are found from the traffic, within what the model says of itself."""

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatronapp_analyzer.align.clocks import ClockAligner, ClockModel
from megatronapp_analyzer.align.device_clocks import FITTED_NS
from megatronapp_analyzer.graph.build import build
from megatronapp_analyzer.model import JobLayout, StepRecords
from megatronapp_common.trace import Flag, RecordKind


def _learn(
    sim: ModuleType, layout: JobLayout, seed: int, steps: int, **job: object
) -> tuple[object, StepRecords, ClockModel]:
    simulator = sim.Simulator(sim.Job(layout=layout, boot_per_node=True, microbatches=8, **job), seed)
    aligner = ClockAligner(layout)
    for view in simulator.steps(0, steps):
        model = aligner.observe(view)
    return simulator, view, model


def _true_offsets_s(simulator: Any, layout: JobLayout) -> NDArray[np.float64]:
    moment = float(simulator.now.max())
    local = [simulator.local_ns(rank, moment) for rank in range(layout.world)]
    offsets: NDArray[np.float64] = (np.array(local, np.float64) - local[0]) * 1e-9
    return offsets


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    offset=st.sampled_from([0.0, 1e-3, 5.0, 86_400.0]),
    drift=st.sampled_from([0.0, 20.0]),
    kwargs=st.sampled_from([{"pp": 2, "dp": 2}, {"pp": 4}, {"pp": 4, "dp": 2}]),
)
def test_offsets_are_found_within_their_stated_uncertainty(
    sim: ModuleType, seed: int, offset: float, drift: float, kwargs: dict[str, int]
) -> None:
    layout = JobLayout.grid(**kwargs, ranks_per_worker=2)
    simulator, _, model = _learn(sim, layout, seed, 12, noise=sim.GPU, clock_offset_s=offset, clock_drift_ppm=drift)
    error = np.abs(model.offset_ns * 1e-9 - _true_offsets_s(simulator, layout))
    assert (error <= model.uncertainty_ns * 1e-9 + 3e-5).all()
    assert error.max() < 1e-3


def test_an_aligned_step_replays_as_if_recorded_on_a_single_clock(sim: ModuleType) -> None:
    layout = JobLayout.grid(pp=2, dp=2, ranks_per_worker=2)
    _, view, model = _learn(sim, layout, 4, 12, noise=sim.GPU, clock_offset_s=3.0)
    graph = build(model.apply(view), tolerance_s=1e-3)
    assert graph.unmatched == 0
    assert build(view).unmatched + len(build(view).messages) > 0
    assert abs((graph.end_s.max() - graph.start_s.min()) - 0.53) < 0.1


def test_a_single_boot_id_needs_no_alignment(sim: ModuleType) -> None:
    layout = JobLayout.grid(pp=2, dp=2)
    view = sim.Simulator(sim.Job(layout=layout), 1).step(0)
    model = ClockAligner(layout).observe(view)
    assert not model.offset_ns.any()
    assert model.worst_ns() == 0.0
    assert model.apply(view) is view


def _of_devices(view: StepRecords, rank: int = 0, shift_ns: int = 0) -> StepRecords:
    """Return the step as ranks with devices record it, the times of one rank's device shifted."""
    records = view.records.copy()
    of_device = (records["kind"] != RecordKind.DATA) & (records["kind"] != RecordKind.METRIC)
    records["flags"][of_device] |= np.uint8(Flag.DEVICE_CLOCK)
    records["start_ns"][of_device & (records["rank"] == rank)] += np.uint64(shift_ns)
    return dataclasses.replace(view, records=records)


def test_devices_that_contradict_nothing_are_trusted_as_far_as_they_were_fitted(sim: ModuleType) -> None:
    layout = JobLayout.grid(pp=2, dp=4)
    view = _of_devices(sim.Simulator(sim.Job(layout=layout, noise=sim.GPU), 1).step(0))
    model = ClockAligner(layout).observe(view)
    assert not model.devices.offset_ns.any()
    assert model.pairs_uncertainty_ns(np.array([[0, 5]])) == [2 * FITTED_NS]
    assert model.apply(view) is view


def test_a_device_that_leaves_collectives_before_others_enter_is_corrected(sim: ModuleType) -> None:
    layout = JobLayout.grid(dp=4)
    view = sim.Simulator(sim.Job(layout=layout, noise=sim.GPU), 1).step(0)
    model = ClockAligner(layout).observe(_of_devices(view, rank=2, shift_ns=30_000_000))
    assert model.devices.offset_ns[2] == pytest.approx(30e6, abs=2e6)
    assert not model.devices.offset_ns[[0, 1, 3]].any()
    assert model.worst_ns() > 20e6  # from few collectives


def test_between_devices_whose_messages_arrive_before_they_were_sent_nothing_is_judged(sim: ModuleType) -> None:
    layout = JobLayout.grid(pp=4)
    view = sim.Simulator(sim.Job(layout=layout, noise=sim.GPU), 1).step(0)
    model = ClockAligner(layout).observe(_of_devices(view, rank=1, shift_ns=15_000_000))
    uncertain, certain = model.pairs_uncertainty_ns(np.array([[1, 2], [2, 3]]))
    assert uncertain > 5e6
    assert certain == 2 * FITTED_NS


def test_without_messages_the_ends_of_collectives_tie_clocks_together(sim: ModuleType) -> None:
    layout = JobLayout.grid(dp=4, ranks_per_worker=2)
    simulator, _, model = _learn(sim, layout, 1, 12, noise=sim.GPU, clock_offset_s=2.0)
    error = np.abs(model.offset_ns * 1e-9 - _true_offsets_s(simulator, layout))
    assert error.max() < 5e-3
    assert model.uncertainty_ns.max() == pytest.approx(25e6, rel=2)
