"""Measures the noise of recorded compute spans, for the sizes in `bench/detect/noise.py` or as blocks to resample.

    python bench/detect_noise.py trace-AR.parquet                                  # print the sizes
    python bench/detect_noise.py RECORDS --write cpu.npz                           # for bench_detectors.py --pace
    python bench/detect_noise.py RECORDS --steps 3:30,62:80 --write gpu.npz        # healthy steps of a job with faults

A file has the columns of the public straggler traces (docs/whatif.md); a folder has the records that a hub has stored:
`traces` of the state of a job, or what `--records` of bench/gpu_faults.py and bench/cpu_faults.py wrote. Workers that
are far slower than their stage are not measured. Sizes are sigmas of logarithms: of single spans around the median of
their worker and step, of that median from step to step, of constant differences between workers of a stage, and of what
all have in common. Run-queue delays are subtracted. All stretches of steps are cut to the length of the shortest.
"""

import argparse
import dataclasses
import itertools
import pathlib
import warnings
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq
from detect.noise import Recording
from numpy.typing import NDArray

from megatronapp_analyzer.offline.analyze import open_traces
from megatronapp_common.trace import DURATION_UNIT_NS, Flag, RecordKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MAD_TO_SIGMA = 1.4826
FAR_SLOWER = 0.1
KINDS = {"forward-compute": RecordKind.FORWARD, "backward-compute": RecordKind.BACKWARD}
MOST_SPANS = 100_000
"""Single spans in a recording."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredNoise:
    """Sizes of the noise, and what to resample."""

    body: float
    bias: float
    worker_sigma: float
    worker_memory: float
    job_sigma: float
    job_memory: float
    recording: Recording


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=pathlib.Path, help="files or folders")
    parser.add_argument("--kind", default="forward-compute", choices=list(KINDS), help="operation to measure")
    parser.add_argument("--steps", type=stretches_of, default=(), help="stretches of healthy steps; all by default")
    parser.add_argument("--write", type=pathlib.Path, help="write the recording of all sources to this .npz file")
    options = parser.parse_args()
    recordings = []
    for source in options.sources:
        read = read_parquet if source.is_file() else read_records
        logs, stage, steps = read(source, options.kind)
        found = measure(logs, stage, chosen(steps, options.steps))
        print(f"{source}, {options.kind}: {logs.shape[1]} workers, {len(steps)} steps of {steps[-1] - steps[0] + 1}")
        for field in dataclasses.fields(found):
            if field.name != "recording":
                print(f"  {field.name:14} {getattr(found, field.name):.4f}")
        recordings.append(found.recording)
    if options.write:
        joined = join(recordings)
        joined.write(options.write)
        rows, length = joined.pace.shape
        print(f"{options.write}: {rows} rows of {length} steps, {len(joined.spans)} spans")


def stretches_of(text: str) -> tuple[tuple[int, int], ...]:
    """Read `3:30,62:80`, steps 3 to 29 and 62 to 79."""
    found = []
    for part in text.split(","):
        first, colon, end = part.partition(":")
        if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
            raise argparse.ArgumentTypeError(f"{part!r} is no stretch of steps; write for example 3:30,62:80")
        found.append((int(first), int(end)))
    return tuple(found)


def chosen(steps: Ints, stretches: tuple[tuple[int, int], ...]) -> list[Ints]:
    """Return the rows of each stretch of steps, of all after the first one by default; ends the program without any."""
    found = [np.flatnonzero((steps >= first) & (steps < end)) for first, end in stretches]
    if not stretches:
        found = [np.arange(1, len(steps))]
    if min(len(rows) for rows in found) < 2:
        raise SystemExit(f"--steps: the records have steps {steps[0]} to {steps[-1]}; choose stretches of these")
    return found


def read_parquet(path: pathlib.Path, kind: str) -> tuple[Floats, Ints, Ints]:
    """Return logarithms of durations [step, worker, microbatch], the stage of each worker, and the steps."""
    table = pq.read_table(path).to_pydict()
    of_kind = np.array(table["optype"]) == kind
    if not of_kind.any():
        raise SystemExit(f"{path} has no operation {kind!r}; choose one with --kind: {sorted(set(table['optype']))}")
    replica, stages, microbatch, step = (
        np.array(table[name])[of_kind].astype(np.int64) for name in ("dp_rank", "stage", "mb_id", "step")
    )
    steps, row = np.unique(step, return_inverse=True)
    workers, column = np.unique(stages * (replica.max() + 1) + replica, return_inverse=True)
    logs = np.full((len(steps), len(workers), int(microbatch.max()) + 1), np.nan)
    logs[row, column, microbatch] = np.log(np.array(table["duration"])[of_kind])
    return logs, workers // (replica.max() + 1), steps


def read_records(path: pathlib.Path, kind: str) -> tuple[Floats, Ints, Ints]:
    """Return the same of the records that a hub has stored."""
    ingest, notes = open_traces(path)
    for note in notes:
        print(note)
    views = sorted((step.view for step in ingest.store.select(0, None, newest=0)), key=lambda view: view.step)
    layout = ingest.attempts[views[0].attempt].layout
    if layout is None:
        raise SystemExit(f"{path} does not say where its ranks are; give the records of a whole job")
    passes = [view.records[view.records["kind"] == int(KINDS[kind])] for view in views]
    chunks = 1 + max(int(each["chunk"].max(initial=0)) for each in passes)
    most = 1 + max(int(each["microbatch"].max(initial=0)) for each in passes)
    logs = np.full((len(views), layout.world, most * chunks), np.nan)
    for row, each in enumerate(passes):
        waited = np.where(each["flags"] & int(Flag.AUX_RUN_QUEUE), each["aux"], 0).astype(np.float64)
        units = np.maximum(each["duration"] - waited, 1.0)
        logs[row, each["rank"], each["microbatch"].astype(np.int64) * chunks + each["chunk"]] = np.log(
            units * DURATION_UNIT_NS
        )
    return logs, np.array(layout.stages), np.array([view.step for view in views])


def measure(logs: Floats, stage: Ints, stretches: list[Ints]) -> MeasuredNoise:
    """Separate durations into what the job, the workers and single spans contribute."""
    logs = logs - median(logs[stretches[0]], axis=(0, 1))  # passes of a step are not equally long
    logs = logs[np.concatenate(stretches)]
    ends = np.cumsum([len(rows) for rows in stretches])[:-1]
    middle = median(logs, axis=2)
    level = median(middle, axis=0)
    bias = level - np.array([np.median(level[stage == own]) for own in stage])
    healthy = np.abs(bias) < FAR_SLOWER
    common = median(middle - level, axis=1)
    count = int(healthy.sum())
    # What n workers have in common has an n-th of the variance of each, which is missing in their distance from it.
    pace = (middle - level - common[:, None])[:, healthy] * np.sqrt(count / max(count - 1, 1))
    spans = logs[:, healthy] - middle[:, healthy, None]
    known = spans[np.isfinite(spans)]
    series = [column for part in np.split(pace, ends) for column in part.T]
    jobs = np.split(common, ends)
    return MeasuredNoise(
        body=spread(spans),
        bias=spread(bias[healthy]),
        worker_sigma=float(np.nanstd(pace)),
        worker_memory=float(np.mean([correlation(column) for column in series])),
        job_sigma=float(np.nanstd(common)),
        job_memory=float(np.mean([correlation(part) for part in jobs])),
        recording=Recording(
            pace=equal_rows(series),
            job=equal_rows(jobs),
            spans=np.random.default_rng(1).permutation(known)[:MOST_SPANS],
        ),
    )


def median(values: Floats, axis: int | tuple[int, ...]) -> Floats:
    """Return medians of known values, NaN where there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a rank without records in a step
        found: Floats = np.nanmedian(values, axis=axis)
    return found


def equal_rows(series: list[Floats]) -> Floats:
    """Return series as rows of an array, as long as the shortest series; none has a missing value."""
    length = min(len(each) for each in series)
    rows = itertools.chain.from_iterable(
        (each[first : first + length] for first in range(0, len(each) - length + 1, length)) for each in series
    )
    return np.array([row for row in rows if np.isfinite(row).all()])


def join(recordings: Sequence[Recording]) -> Recording:
    """Return the rows of all recordings, as long as the shortest, and equally many spans of each."""
    most = min(len(each.spans) for each in recordings)
    return Recording(
        pace=equal_rows([row for each in recordings for row in each.pace]),
        job=equal_rows([row for each in recordings for row in each.job]),
        spans=np.concatenate([each.spans[:most] for each in recordings]),
    )


def spread(values: Floats) -> float:
    return MAD_TO_SIGMA * float(np.nanmedian(np.abs(values)))


def correlation(series: Floats) -> float:
    """Return the correlation of a recorded step with the one recorded before it."""
    known = np.isfinite(series[1:]) & np.isfinite(series[:-1])
    return float(np.corrcoef(series[1:][known], series[:-1][known])[0, 1])


if __name__ == "__main__":
    main()
