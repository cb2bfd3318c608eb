"""Curves of training: points from METRIC records, in bounded memory."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.hub.ingest.thinning_list import ThinningList
from megatronapp_common.trace import Metric, RecordKind

POINTS = 50_000
"""Points kept per curve; older ones are thinned out."""
NAMES: dict[int, str] = {
    Metric.LOSS: "loss",
    Metric.LEARNING_RATE: "learningRate",
    Metric.GRAD_NORM: "gradNorm",
    Metric.TOKENS_PER_SECOND: "tokensPerSecond",
    Metric.TFLOPS_PER_GPU: "tflopsPerGpu",
    Metric.VALIDATION_LOSS: "validationLoss",
    Metric.CONSUMED_SAMPLES: "consumedSamples",
}


@dataclasses.dataclass(frozen=True, slots=True)
class CurvePoint:
    """One sample; `start_ns` is on the monotonic clock of the rank that wrote it."""

    name: str
    attempt: int
    step: int
    value: float
    start_ns: int
    rank: int

    @property
    def key(self) -> tuple[str, int, int]:
        """Return name, attempt and step."""
        return self.name, self.attempt, self.step


def points_of(attempt: int, rank: int, records: NDArray[np.void]) -> Iterator[CurvePoint]:
    """Yield the samples among `records`; metrics of a newer release are skipped."""
    is_sample = records["kind"] == RecordKind.METRIC
    if not is_sample.any():  # frames of all ranks but one: selecting nothing from records costs more than asking
        return
    samples = records[is_sample]
    values = samples["aux"].astype("<u4").view("<f4")
    for row, value in zip(samples, values, strict=True):
        if (name := NAMES.get(int(row["comm"]))) is not None:
            yield CurvePoint(name, attempt, int(row["step"]), float(value), int(row["start_ns"]), rank)


class Curves:
    """All curves, each in the order in which its points were added."""

    def __init__(self) -> None:
        self._curves: dict[str, ThinningList[CurvePoint]] = {name: ThinningList(POINTS) for name in NAMES.values()}

    def add(self, point: CurvePoint) -> None:
        """Append a point to its curve."""
        self._curves[point.name].append(point)

    def curve(self, name: str) -> Iterator[CurvePoint]:
        """Return the points of one curve."""
        return iter(self._curves[name])

    def points(self) -> list[CurvePoint]:
        """Return every point of every curve."""
        return [point for curve in self._curves.values() for point in curve]
