"""Clock model of a job: offset and drift of every node's clock against the clock of the first rank.

The clock of a device is another domain, (boot id, device): its records are corrected apart from its host's.
"""

import collections
import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.align.anchors import anchors_of
from megatronapp_analyzer.align.device_clocks import DeviceClocks, check, has_device_clock
from megatronapp_analyzer.graph.matching import Index
from megatronapp_analyzer.model import JobLayout, StepRecords
from megatronapp_common.trace import RecordKind

WINDOW = 64
FIT_POINTS = 8
"""Number of anchors from which on a drift is fitted."""
HUBER = 1.345
ROUNDS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClockModel:
    """Offsets to subtract from each rank's times, and their uncertainty, in ns."""

    offset_ns: Index
    """Offset of the node's clock."""
    uncertainty_ns: NDArray[np.float64]
    """Uncertainty against the clock of the first rank; 0 on the same clock, infinite where nothing ties the two."""
    devices: DeviceClocks
    """The same for times of devices, against the clocks of their nodes."""

    def apply(self, view: StepRecords) -> StepRecords:
        """Return the step on the clock of the first rank."""
        if not self.offset_ns.any() and not self.devices.offset_ns.any():
            return view
        records = view.records.copy()
        shift = self.offset_ns[records["rank"]]
        shift += np.where(has_device_clock(records), self.devices.offset_ns[records["rank"]], 0)
        records["start_ns"] = (records["start_ns"].astype(np.int64) - shift).astype(np.uint64)
        return dataclasses.replace(view, records=records)

    def rank_uncertainty_ns(self) -> NDArray[np.float64]:
        """Return the uncertainty of each rank's times, those of its device included."""
        return self.uncertainty_ns + self.devices.uncertainty_ns

    def worst_ns(self) -> float:
        """Return the largest finite uncertainty."""
        uncertainty_ns = self.rank_uncertainty_ns()
        return float(uncertainty_ns[np.isfinite(uncertainty_ns)].max(initial=0.0))

    def pair_uncertainty_ns(self, first: int, second: int) -> float:
        """Return the uncertainty of a difference of times between two ranks."""
        devices = float(self.devices.uncertainty_ns[first] + self.devices.uncertainty_ns[second])
        if self.offset_ns[first] == self.offset_ns[second]:
            return devices
        return float(self.uncertainty_ns[first] + self.uncertainty_ns[second]) + devices


class ClockAligner:
    """Estimator that learns offsets step by step; memory is bounded by WINDOW anchors per pair of clocks."""

    def __init__(self, layout: JobLayout) -> None:
        self._world = layout.world
        self._points: dict[tuple[str, str], collections.deque[tuple[float, float, float]]] = {}

    def observe(self, view: StepRecords) -> ClockModel:
        """Learn from one step and return the model that is valid for it."""
        boots = [view.boot_ids.get(rank, "") for rank in range(self._world)]
        names = list(dict.fromkeys(boots))
        domain = np.array([names.index(boot) for boot in boots], np.int64)
        devices = check(view, domain)
        if len(names) == 1:
            zeros = np.zeros(self._world)
            return ClockModel(offset_ns=zeros.astype(np.int64), uncertainty_ns=zeros, devices=devices)
        time_s = _time_s(view, domain)
        for anchor in anchors_of(view, domain):
            key = (names[anchor.first], names[anchor.second])
            points = self._points.setdefault(key, collections.deque(maxlen=WINDOW))
            points.append((time_s, anchor.offset_ns, anchor.uncertainty_ns))
        offset, doubt = self._spread(names, time_s)
        rounded = np.round(offset[domain]).astype(np.int64)
        return ClockModel(offset_ns=rounded, uncertainty_ns=doubt[domain], devices=devices)

    def _spread(self, names: list[str], time_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return offsets from the first clock along the paths of least uncertainty (Prim's algorithm)."""
        edges = [
            (_estimate(points, time_s), names.index(a), names.index(b))
            for (a, b), points in self._points.items()
            if a in names and b in names
        ]
        offset, doubt = np.zeros(len(names)), np.full(len(names), np.inf)
        doubt[0] = 0.0
        reached = {0}
        while True:
            steps = [
                (error, a, b, value) if a in reached else (error, b, a, -value)
                for (value, error), a, b in edges
                if (a in reached) != (b in reached)
            ]
            if not steps:
                return offset, doubt
            error, known, new, value = min(steps)
            offset[new], doubt[new] = offset[known] + value, doubt[known] + error
            reached.add(new)


def _time_s(view: StepRecords, domain: Index) -> float:
    """Return the time at which the step ended on the first clock."""
    records = view.records
    own = records[(domain[records["rank"]] == 0) & (records["kind"] != RecordKind.METRIC)]
    return float((own if len(own) else records)["start_ns"].max()) * 1e-9


def _estimate(points: collections.deque[tuple[float, float, float]], time_s: float) -> tuple[float, float]:
    """Fit a line robust against bad anchors to the window; return offset at `time_s` and its uncertainty, in ns."""
    table = np.array(points)
    best = table[np.argmin(table[:, 2])]
    base = table[:, 1] - best[1]
    age = table[:, 0] - time_s
    if len(table) < FIT_POINTS or np.ptp(age) < 1.0:
        return float(best[1]), float(best[2])
    weight = 1.0 / np.maximum(table[:, 2], 1e3)
    line, residual = _huber_line(age, base, weight)
    error = 1.4826 * float(np.median(np.abs(residual)))
    return float(best[1] + line), float(min(best[2], 3 * error + 1e3))


def _huber_line(
    age: NDArray[np.float64], values: NDArray[np.float64], weight: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """Return the value at age 0 of a weighted Huber fit, and the residuals (iteratively reweighted least squares)."""
    design = np.stack([np.ones_like(age), age], axis=1)
    current = weight
    residual = values
    for _ in range(ROUNDS):
        root = np.sqrt(current)[:, None]
        solution = np.linalg.lstsq(design * root, values * root[:, 0], rcond=None)[0]
        residual = values - design @ solution
        scale = 1.4826 * float(np.median(np.abs(residual))) + 1.0
        current = weight * np.minimum(1.0, HUBER * scale / np.maximum(np.abs(residual), 1e-9))
    return float(solution[0]), residual
