"""Clock model of a job: offset and drift of every node's clock against the clock of the first rank.

The clock of a device is another domain, (boot id, device): its records are corrected apart from its host's.
"""

import dataclasses
import heapq

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.align.anchor_window import AnchorWindow
from megatronapp_analyzer.align.anchors import anchors_of
from megatronapp_analyzer.align.device_clocks import HOST_KINDS, DeviceClocks, check, no_devices
from megatronapp_analyzer.align.line_fit import offsets_at
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_analyzer.graph.matching import Index
from megatronapp_analyzer.graph.records import bytes_of
from megatronapp_analyzer.model import JobLayout, StepRecords, select_rows
from megatronapp_common.trace import Flag, RecordKind
from megatronapp_native import shift_starts


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
        shifted = shift_starts(
            bytes_of(view.records), self.offset_ns, self.devices.offset_ns, int(Flag.DEVICE_CLOCK), HOST_KINDS
        )
        return dataclasses.replace(view, records=shifted.view(view.records.dtype))

    def align(self, step: MatchedStep) -> "AlignedStep":
        """Return the step on the clock of the first rank, with this model."""
        moved = self.apply(step.view)
        if moved is step.view:
            return AlignedStep(clocks=self, step=step)
        # Times of a device that are corrected may change the order of a rank's spans.
        alike = not self.devices.offset_ns.any()
        return AlignedStep(clocks=self, step=step.on_other_clocks(moved) if alike else MatchedStep(moved))

    def rank_uncertainty_ns(self) -> NDArray[np.float64]:
        """Return the uncertainty of each rank's times, those of its device included."""
        return self.uncertainty_ns + self.devices.uncertainty_ns

    def worst_ns(self) -> float:
        """Return the largest finite uncertainty."""
        uncertainty_ns = self.rank_uncertainty_ns()
        return float(uncertainty_ns[np.isfinite(uncertainty_ns)].max(initial=0.0))

    def pairs_uncertainty_ns(self, pairs: Index) -> NDArray[np.float64]:
        """Return the uncertainty of differences of times between the two ranks of each row of `pairs`."""
        first, second = pairs[:, 0], pairs[:, 1]
        devices = self.devices.uncertainty_ns[first] + self.devices.uncertainty_ns[second]
        nodes = self.uncertainty_ns[first] + self.uncertainty_ns[second]
        return np.where(self.offset_ns[first] == self.offset_ns[second], devices, nodes + devices)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AlignedStep:
    """A step on the clock of the first rank, and the clocks by which it was aligned."""

    clocks: ClockModel
    step: MatchedStep


class ClockAligner:
    """Estimator that learns offsets step by step; memory is bounded by an `AnchorWindow` for each pair of clocks."""

    def __init__(self, layout: JobLayout) -> None:
        self._world = layout.world
        self._windows: dict[tuple[str, str], AnchorWindow] = {}

    def align(self, step: MatchedStep) -> AlignedStep:
        """Learn from one step and return it aligned."""
        return self.observe_matched(step).align(step)

    def observe(self, view: StepRecords) -> ClockModel:
        """Learn from one step and return the model that is valid for it."""
        return self.observe_matched(MatchedStep(view))

    def observe_matched(self, step: MatchedStep) -> ClockModel:
        """Learn from one step and return the model that is valid for it."""
        view = step.view
        boots = [view.boot_ids.get(rank, "") for rank in range(self._world)]
        names = list(dict.fromkeys(boots))
        place = {name: number for number, name in enumerate(names)}
        domain = np.array([place[boot] for boot in boots], np.int64)
        devices = check(view, domain) if step.record_columns.flags & Flag.DEVICE_CLOCK else no_devices(self._world)
        if len(names) == 1:
            zeros = np.zeros(self._world)
            return ClockModel(offset_ns=zeros.astype(np.int64), uncertainty_ns=zeros, devices=devices)
        time_s = _time_s(step, domain)
        for anchor in anchors_of(step, domain):
            key = (names[anchor.first], names[anchor.second])
            self._windows.setdefault(key, AnchorWindow()).add((time_s, anchor.offset_ns, anchor.uncertainty_ns))
        offset, doubt = self._spread(names, time_s)
        rounded = np.round(offset[domain]).astype(np.int64)
        return ClockModel(offset_ns=rounded, uncertainty_ns=doubt[domain], devices=devices)

    def _spread(self, names: list[str], time_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return offsets from the first clock along the paths of least uncertainty (Prim's algorithm)."""
        place = {name: number for number, name in enumerate(names)}
        pairs = [(a, b) for a, b in self._windows if a in place and b in place]
        windows = [self._windows[pair] for pair in pairs]
        estimates = offsets_at([window.points for window in windows], time_s)
        ways: list[list[tuple[float, int, int, float]]] = [[] for _ in names]
        for (first, second), window, (value, least_error) in zip(pairs, windows, estimates, strict=True):
            a, b, error = place[first], place[second], least_error + window.doubt_ns
            ways[a].append((error, a, b, value))
            ways[b].append((error, b, a, -value))
        offset, doubt = np.zeros(len(names)), np.full(len(names), np.inf)
        doubt[0] = 0.0
        reached = {0}
        crossing = list(ways[0])
        heapq.heapify(crossing)
        while crossing:
            error, known, new, value = heapq.heappop(crossing)
            if new in reached:
                continue
            offset[new], doubt[new] = offset[known] + value, doubt[known] + error
            reached.add(new)
            for way in ways[new]:
                if way[2] not in reached:
                    heapq.heappush(crossing, way)
        return offset, doubt


def _time_s(step: MatchedStep, domain: Index) -> float:
    """Return the time at which the step ended on the first clock."""
    records, columns = step.view.records, step.record_columns
    own = select_rows(records, (domain == 0)[columns.rank] & (columns.kind != RecordKind.METRIC))
    return float((own if len(own) else records)["start_ns"].max()) * 1e-9
