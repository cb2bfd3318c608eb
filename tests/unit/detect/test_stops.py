"""Stopped processes: by how much their devices' passes are longer for it, and what the detector says of them."""

import numpy as np
import pytest
from detect.faults import parse
from detect.noise import GPU
from detect.runner import run
from detect.score import Score, score
from detect.simulation import SimulatedJob
from detect.suite import LAYOUTS, DetectionCase
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.graph.records import laid_out_s
from megatronapp_analyzer.graph.stops import HOST_DRIVEN_KINDS, Stops, lengthened_by_stops_s, lengthening_s
from megatronapp_analyzer.model import RANK_RECORD
from megatronapp_common.trace import DURATION_UNIT_NS, Flag, RecordKind

USUAL_S = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=4)


@given(USUAL_S, st.floats(1.0, 3.0), st.floats(0.0, 1.0), st.integers(0, 2**32 - 1))
def test_a_stop_lengthens_few_passes_and_slow_compute_all(
    usual_s: list[float], factor: float, part: float, seed: int
) -> None:
    """Passes of several groups, all slower by a factor; of those that a stop overlaps, a part of it is waited for."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(len(usual_s)), 16)
    own = np.repeat(usual_s, 16) * factor
    stopped = np.where(rng.permuted(np.tile(np.arange(16) < 10, (len(usual_s), 1)), axis=1).ravel(), 0.3, 0.0)
    found = lengthening_s(group, own + part * stopped, stopped)
    np.testing.assert_allclose(found, part * stopped, rtol=1e-6, atol=1e-9)


@given(USUAL_S, st.integers(0, 2**32 - 1))
def test_passes_that_are_all_disturbed_are_longer_by_their_stops(usual_s: list[float], seed: int) -> None:
    group = np.repeat(np.arange(len(usual_s)), 8)
    stopped = np.random.default_rng(seed).uniform(0.01, 0.5, len(group))
    found = lengthening_s(group, np.repeat(usual_s, 8) + stopped, stopped)
    np.testing.assert_allclose(found, stopped, rtol=1e-6, atol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=30))
def test_no_pass_is_longer_by_more_than_its_stop(passes: list[tuple[int, float, float]]) -> None:
    group = np.array([place for place, _, _ in passes], np.int64)
    stopped = np.array([stop for _, _, stop in passes])
    found = lengthening_s(group, np.array([length for _, length, _ in passes]), stopped)
    assert (found >= 0).all()
    assert (found <= stopped).all()


def device_span(kind: RecordKind, start_s: float, length_s: float, *, lead_s: float | None = None) -> np.void:
    """Return a span of rank 0, whose host had launched it `lead_s` before it ended."""
    out: np.void = np.zeros(1, RANK_RECORD)[0]
    out["kind"], out["flags"] = kind, 0 if kind in (RecordKind.STOPPED, RecordKind.DATA) else Flag.DEVICE_CLOCK
    out["start_ns"], out["duration"] = round(start_s * 1e9), round(length_s * 1e9) // DURATION_UNIT_NS
    if lead_s is not None:
        out["flags"] |= Flag.AUX_LEAD
        out["aux"] = round(lead_s * 1e9) // DURATION_UNIT_NS
    return out


def lengthened(spans: list[np.void], stop: tuple[float, float]) -> list[float]:
    """Return by how many seconds a stop, with its start and length, lengthened each span."""
    records = np.array([*spans, device_span(RecordKind.STOPPED, *stop)], RANK_RECORD)
    start, end = laid_out_s(records[:-1], 0)
    return [float(each) for each in lengthened_by_stops_s(records[:-1], start, end, Stops(records, 0))]


@given(lead_s=st.floats(0.0, 0.1), begin_s=st.floats(1.0, 1.1), length_s=st.floats(0.001, 0.2))
def test_a_stop_lengthens_nothing_that_was_launched_before_it(lead_s: float, begin_s: float, length_s: float) -> None:
    """The norm of the gradients lasts 0.1 s from second 1 on, and is launched until `lead_s` before its end."""
    (found,) = lengthened([device_span(RecordKind.GRAD_NORM, 1.0, 0.1, lead_s=lead_s)], (begin_s, length_s))
    launched_s = 1.1 - lead_s
    assert found == pytest.approx(max(min(begin_s + length_s, launched_s) - begin_s, 0.0), abs=1e-6)


def test_a_stop_while_a_device_waits_for_the_norm_of_another_lengthens_nothing() -> None:
    """The other rank begins its norm after 0.06 s; then a stop of 0.05 s has 0.01 s left."""
    other = device_span(RecordKind.GRAD_NORM, 1.06, 0.04)
    other["rank"] = 1
    assert lengthened([device_span(RecordKind.GRAD_NORM, 1.0, 0.1), other], (1.02, 0.05)) == pytest.approx([0.01, 0.0])


@pytest.mark.parametrize("kind", sorted(HOST_DRIVEN_KINDS | {RecordKind.RECV_WAIT, RecordKind.EMBED_REDUCE}))
def test_a_stop_lengthens_what_a_host_drives_and_no_wait_for_others(kind: RecordKind) -> None:
    (found,) = lengthened([device_span(kind, 1.0, 0.1)], (1.02, 0.05))
    assert found == pytest.approx(0.05 if kind in HOST_DRIVEN_KINDS else 0.0, abs=1e-6)


def scored(layout: str, text: str, *, stops_devices: bool) -> Score:
    """Return the score of our detector in a job of 36 steps with faults."""
    grid = LAYOUTS[layout]
    faults = parse(text, grid)
    job = SimulatedJob(grid=grid, noise=GPU, microbatches=8, faults=faults, stops_devices=stops_devices)
    case = DetectionCase(row="stop", layout=layout, job=job, seed=3, steps=36, faults=faults)
    return score([run(case, ["ours"]).windows["ours"]])


CASES = {
    "rank": ("dp4-pp2", "stop rank=2 duty=0.25 cycle=0.5 from=16", True),
    "worker": ("dp2-pp4", "stop worker=1 duty=0.4 cycle=0.1 from=16", True),
    "tensor-parallel": ("dp4-pp2-tp2", "stop rank=2 duty=0.5 cycle=0.1 from=16", True),
    "two": ("dp2-pp4", "stop rank=2 duty=0.5 cycle=0.1 from=16; stop rank=5 duty=0.5 cycle=0.1 from=16", True),
    "launches": ("dp2-pp4", "stop rank=2 duty=0.5 cycle=0.1 from=16; stop rank=5 duty=0.5 cycle=0.1 from=16", False),
}


@pytest.mark.full("more subjects", but=("tensor-parallel", "launches"))
@pytest.mark.parametrize("case", CASES)
def test_stopped_processes_of_devices_are_faults_of_their_hosts(case: str) -> None:
    layout, text, stops_devices = CASES[case]
    total = scored(layout, text, stops_devices=stops_devices)
    assert (total.hits, total.false) == (total.faults, 0)
    assert set(total.causes) == {("host", "host")}
    assert max(total.delays) <= 6
    assert max(total.cost_errors) < 0.5


def test_the_cost_of_a_tensor_parallel_rank_includes_that_others_leave_with_it() -> None:
    total = scored("dp4-pp2-tp2", "compute rank=2 factor=1.3 from=16", stops_devices=False)
    assert (total.hits, total.false) == (1, 0)
    assert total.cost_errors[0] < 0.1
