"""Measures the noise of recorded compute spans, for the sizes in `bench/detect/noise.py` or as blocks to resample.

    python bench/detect_noise.py trace-AR.parquet                        # print the sizes
    python bench/detect_noise.py trace-AR.parquet --write pace.npy       # for bench_detectors.py --pace pace.npy

The file has the columns of the public straggler traces (docs/whatif.md). Workers that are far slower than their stage
are not measured. Sizes are sigmas of logarithms: of single spans around the median of their worker and step, of that
median from step to step, of constant differences between workers of a stage, and of what all workers have in common.
"""

import argparse
import dataclasses
import pathlib

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAD_TO_SIGMA = 1.4826
FAR_SLOWER = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredNoise:
    """Sizes of the noise, and the pace of each worker in each step around its mean, [worker, step]."""

    body: float
    bias: float
    worker_sigma: float
    worker_memory: float
    job_sigma: float
    job_memory: float
    pace: Floats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--kind", default="forward-compute", help="operation to measure")
    parser.add_argument("--write", type=pathlib.Path, help="write the pace of workers to this .npy file")
    options = parser.parse_args()
    logs, stage, steps = read(options.file, options.kind)
    found = measure(logs, stage)
    print(f"{options.kind}: {logs.shape[1]} workers, {len(steps)} recorded steps of {steps[-1] - steps[0] + 1}")
    for field in dataclasses.fields(found):
        if field.name != "pace":
            print(f"  {field.name:14} {getattr(found, field.name):.4f}")
    if options.write:
        np.save(options.write, found.pace)


def read(path: pathlib.Path, kind: str) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Return logarithms of durations [step, worker, microbatch], the stage of each worker, and the steps."""
    table = pq.read_table(path).to_pydict()
    chosen = np.array(table["optype"]) == kind
    if not chosen.any():
        raise SystemExit(f"{path} has no operation {kind!r}; choose one with --kind: {sorted(set(table['optype']))}")
    replica, stages, microbatch, step = (
        np.array(table[name])[chosen].astype(np.int64) for name in ("dp_rank", "stage", "mb_id", "step")
    )
    steps, row = np.unique(step, return_inverse=True)
    workers, column = np.unique(stages * (replica.max() + 1) + replica, return_inverse=True)
    logs = np.full((len(steps), len(workers), int(microbatch.max()) + 1), np.nan)
    logs[row, column, microbatch] = np.log(np.array(table["duration"])[chosen])
    return logs, workers // (replica.max() + 1), steps


def measure(logs: Floats, stage: NDArray[np.int64]) -> MeasuredNoise:
    """Separate durations into what the job, the workers and single spans contribute."""
    middle = np.nanmedian(logs, axis=2)
    level = np.nanmedian(middle, axis=0)
    bias = level - np.array([np.median(level[stage == own]) for own in stage])
    healthy = np.abs(bias) < FAR_SLOWER
    common = np.nanmedian(middle - level, axis=1)
    pace = (middle - level - common[:, None])[:, healthy]
    return MeasuredNoise(
        body=spread(logs[:, healthy] - middle[:, healthy, None]),
        bias=spread(bias[healthy]),
        worker_sigma=float(np.nanstd(pace)),
        worker_memory=float(np.mean([correlation(column) for column in pace.T])),
        job_sigma=float(np.std(common)),
        job_memory=correlation(common),
        pace=pace.T,
    )


def spread(values: Floats) -> float:
    return MAD_TO_SIGMA * float(np.nanmedian(np.abs(values)))


def correlation(series: Floats) -> float:
    """Return the correlation of a recorded step with the one recorded before it."""
    return float(np.corrcoef(series[1:], series[:-1])[0, 1])


if __name__ == "__main__":
    main()
