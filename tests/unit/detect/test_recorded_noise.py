"""Noise that is measured in recorded runs."""

import argparse
import pathlib

import detect_noise
import numpy as np
import pytest
from detect.layout import Grid
from detect.noise import CPU, Recording, autocorrelated
from detect.simulation import JobSimulation, SimulatedJob

from megatronapp_analyzer.model import Communicator
from megatronapp_analyzer.offline.job import RecordedJob, RecordedRank
from megatronapp_analyzer.offline.stored import write_traces
from megatronapp_common.topology import Topology
from megatronapp_common.trace import RECORD

GRID = Grid(dp=2, pp=2)


def simulated_job(steps: int) -> RecordedJob:
    traces = JobSimulation(SimulatedJob(grid=GRID, noise=CPU, microbatches=4), 3, steps).traces()
    records = np.concatenate([trace.records for trace in traces])
    topology = Topology(tensor=1, context=1, data=GRID.dp, pipeline=GRID.pp)
    ranks = [
        RecordedRank(
            rank=rank,
            coordinates=topology.coordinates(rank),
            worker=0,
            local_rank=rank,
            node="node-0",
            device="cpu",
            communicators=[Communicator(kind, members) for kind, members in GRID.comms[rank].values()],
            records=records[records["rank"] == rank][list(RECORD.names or ())].astype(RECORD),
        )
        for rank in range(GRID.world)
    ]
    layout = {"tensor": 1, "pipeline": GRID.pp, "data": GRID.dp, "virtualPipeline": 1}
    return RecordedJob(source="simulated", layout=layout, world=GRID.world, ranks=ranks)


def test_noise_is_measured_and_recorded(tmp_path: pathlib.Path) -> None:
    """Sizes that are drawn are found again; the recording has the stretches that are chosen, and no missing value."""
    rng = np.random.default_rng(2)
    ranks, steps, passes = 4, 1200, 8
    pace = autocorrelated(rng, steps, ranks, 0.05, 0.9)
    job = autocorrelated(rng, steps, 1, 0.03, 0.8)
    logs = np.log(0.02) + (pace + job)[:, :, None] + 0.1 * rng.standard_normal((steps, ranks, passes))
    logs[5, 1] = np.nan
    stretches = [np.arange(0, 600), np.arange(700, 1000), np.arange(1010, 1200)]
    found = detect_noise.measure(logs, np.zeros(ranks, np.int64), stretches)
    assert found.recording.spans.std() == pytest.approx(0.1, rel=0.05)
    assert found.worker_sigma == pytest.approx(0.05, rel=0.35)
    assert found.recording.pace.shape[1] == found.recording.job.shape[1] == 190
    assert len(found.recording.job) == 5
    assert len(found.recording.pace) == 5 * ranks - 1  # not the row with the missing step
    assert np.isfinite(found.recording.pace).all() and np.isfinite(found.recording.spans).all()


def test_noise_is_read_from_what_a_hub_stored(tmp_path: pathlib.Path) -> None:
    write_traces(simulated_job(steps=12), tmp_path / "traces")
    logs, stage, steps = detect_noise.read_records(tmp_path / "traces", "backward-compute")
    assert logs.shape == (12, 4, 4) and np.isfinite(logs).all()
    assert (stage.tolist(), steps.tolist()) == ([0, 0, 1, 1], list(range(12)))
    assert np.exp(np.median(logs[2:])) == pytest.approx(0.04e9, rel=0.2)


@pytest.mark.parametrize("text", ["3", "5:3", "a:b", "3:30,"])
def test_stretches_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no stretch of steps; write for example"):
        detect_noise.stretches_of(text)


def test_stretches_are_of_recorded_steps() -> None:
    steps = np.arange(100, 160)
    first, second = detect_noise.chosen(steps, detect_noise.stretches_of("103:130,140:150"))
    assert (steps[first].tolist(), steps[second].tolist()) == (list(range(103, 130)), list(range(140, 150)))
    with pytest.raises(SystemExit, match="the records have steps 100 to 159; choose stretches of these"):
        detect_noise.chosen(steps, ((0, 50),))


def test_recordings_are_joined() -> None:
    short = Recording(pace=np.zeros((2, 5)), job=np.zeros((1, 5)), spans=np.zeros(7))
    long = Recording(pace=np.ones((1, 12)), job=np.ones((1, 12)), spans=np.ones(9))
    joined = detect_noise.join([short, long])
    assert joined.pace[:, 0].tolist() == [0, 0, 1, 1] and joined.pace.shape == (4, 5)
    assert joined.job.shape == (3, 5)
    assert joined.spans.tolist() == [0] * 7 + [1] * 7
