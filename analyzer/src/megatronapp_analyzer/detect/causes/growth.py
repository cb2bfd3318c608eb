"""Growth of a time of each column (rank, unit), against its own healthy steps or its peers."""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.baseline import ColumnHistory, Mask, median_of_others_by
from megatronapp_analyzer.detect.causes.collective_transfers import CollectiveTransfers
from megatronapp_analyzer.detect.causes.compute_cause import PassParts
from megatronapp_analyzer.detect.features import Floats, Ints, StepFeatures
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.units import Units
from megatronapp_analyzer.model import JobLayout


class GrowthBaseline:
    """Usual length of something that each column does in a step; `peers` numbers columns that do the same."""

    def __init__(self, peers: Ints, settings: DetectorSettings) -> None:
        self._peers = peers
        self._least = settings.min_history
        self._history = ColumnHistory(len(peers), settings.window)

    def read(self, values_s: Floats, healthy: Mask) -> Floats:
        """Return by how much each value is above the usual, in logarithms, NaN where unknown; learn healthy ones.

        The larger one of both references: a column that was slow from the start is usual to itself.
        """
        growth, _ = self.read_both(values_s, healthy)
        return growth

    def read_both(self, values_s: Floats, healthy: Mask) -> tuple[Floats, Floats]:
        """Return the same as `read`, and that over each column's own healthy steps alone."""
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(values_s > 0, np.log(values_s), np.nan)
        own: Floats = np.where(self._history.count >= self._least, logs - self._history.median(), np.nan)
        growth: Floats = np.fmax(own, logs - median_of_others_by(logs, self._peers))
        self._history.add(logs, healthy)
        return growth, own


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartGrowth:
    """Growth of what belongs to passes in one step, in logarithms; NaN where it is unknown."""

    optimizer: Floats
    """Growth of the optimizer of each rank."""
    optimizer_own: Floats
    """The same over its own healthy steps alone."""
    transfers: Floats
    """Growth of the collectives inside the passes of each unit."""

    def of(self, ranks: tuple[int, ...], units: tuple[int, ...]) -> PassParts:
        """Return the growth of a subject: the median of its ranks, and of the units that it is among."""
        return PassParts(optimizer=_median(self.optimizer[list(ranks)]), transfers=_median(self.transfers[list(units)]))


class PartBaselines:
    """Usual length of the optimizer of each rank, and of the collectives inside the passes of each unit."""

    def __init__(self, layout: JobLayout, units: Units, settings: DetectorSettings) -> None:
        self._of_rank = units.of_rank
        self._optimizer = GrowthBaseline(np.array(layout.stages, np.int64), settings)
        self._spans = GrowthBaseline(units.stage, settings)
        self._kernels = GrowthBaseline(units.stage, settings)

    def read(self, features: StepFeatures, transfers: CollectiveTransfers, healthy: Mask) -> PartGrowth:
        """Judge one step, and learn from units that are `healthy`."""
        optimizer, optimizer_own = self._optimizer.read_both(features.optimizer_s, healthy[self._of_rank])
        return PartGrowth(
            optimizer=optimizer,
            optimizer_own=optimizer_own,
            transfers=self.transfers(transfers, healthy),
        )

    def transfers(self, transfers: CollectiveTransfers, healthy: Mask) -> Floats:
        """Return the growth of the collectives of each unit."""
        spans, kernels = (
            baseline.read(np.where(transfers.units_by_nccl == by_nccl, transfers.units_s, np.nan), healthy)
            for baseline, by_nccl in ((self._spans, False), (self._kernels, True))
        )
        return np.where(transfers.units_by_nccl, kernels, spans)


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
