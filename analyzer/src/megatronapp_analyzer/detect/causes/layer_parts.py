"""Growth of memory-bound parts of layers beyond that of others, in steps that are recorded in detail, on devices.

A norm reads and writes its input and computes little; attention and MLP multiply matrices. Where other work uses the
memory's bandwidth, norms grow most.
"""

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask
from megatronapp_analyzer.detect.causes.growth import GrowthBaseline
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.model import JobLayout, RankRecords, StepRecords
from megatronapp_common.trace import Flag, LayerSite, RecordKind

LAYER_KINDS = frozenset({RecordKind.LAYER_FORWARD, RecordKind.LAYER_BACKWARD})
NORMS = (LayerSite.ATTENTION_NORM, LayerSite.MLP_NORM, LayerSite.FINAL_NORM)
PRODUCTS = (LayerSite.ATTENTION, LayerSite.MLP)


class LayerParts:
    """Norms and matrix products of each rank in the newest detailed step, against peers in it and earlier ones."""

    def __init__(self, layout: JobLayout, settings: DetectorSettings) -> None:
        stages: Ints = np.array(layout.stages, np.int64)
        self._norms = GrowthBaseline(stages, settings)
        self._products = GrowthBaseline(stages, settings)
        self._excess = np.full(layout.world, np.nan)
        self._step = -1

    def read(self, view: StepRecords, healthy: Mask) -> None:
        """Take a step; one without details of a device changes nothing. `healthy` ranks are learned from."""
        records = view.records
        details = rec.is_kind(records["kind"], LAYER_KINDS) & ((records["flags"] & Flag.DEVICE_CLOCK) != 0)
        if not details.any():
            return
        world = len(self._excess)
        found = records[details & (records["rank"] < world)]
        norms = self._norms.read(_seconds(found, NORMS, world), healthy)
        products = self._products.read(_seconds(found, PRODUCTS, world), healthy)
        self._excess, self._step = norms - products, view.step

    def excess(self, ranks: tuple[int, ...], since: int) -> float:
        """Return by how much more norms grew than products, in logarithms; NaN without details since a step."""
        known = self._excess[list(ranks)]
        known = known[np.isfinite(known)]
        return float(np.median(known)) if self._step >= since and len(known) else float("nan")


def _seconds(records: RankRecords, sites: tuple[LayerSite, ...], world: int) -> Floats:
    """Return the seconds of each rank in spans of some sites; NaN without any."""
    chosen = records[np.isin(records["ordinal"], [int(site) for site in sites])]
    seconds = np.zeros(world)
    np.add.at(seconds, chosen["rank"], rec.durations_s(chosen))
    return np.where(seconds > 0, seconds, np.nan)
