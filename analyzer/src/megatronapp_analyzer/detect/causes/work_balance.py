"""Evidence that a replica gets more work than the others, or than before."""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.baseline import filled
from megatronapp_analyzer.detect.candidates import CauseEvidence
from megatronapp_analyzer.detect.compute_channel import LogChannel
from megatronapp_analyzer.detect.features import Floats, StepFeatures, segment_medians
from megatronapp_analyzer.detect.settings import DEVICE, DetectorSettings
from megatronapp_analyzer.detect.statistics.persistence import VoteWindow
from megatronapp_analyzer.model import Cause, JobLayout

LIMITS = dataclasses.replace(
    DEVICE, compute_floor=0.01, compute_ratio=1.03, peer_ratio=1.03, peer_spread=0.01, least_peer_spread=0.005
)
"""Work is counted and not measured, but differs from step to step; replicas have no constant differences."""


class WorkBalance:
    """Expected length of the passes of replicas, by the work that they report."""

    def __init__(self, layout: JobLayout, settings: DetectorSettings) -> None:
        self._settings = settings
        self._chunks = layout.vpp
        self._replica_of = np.array([at.dp for at in layout.coordinates], np.int64)
        count = int(self._replica_of.max()) + 1
        self._channel = LogChannel(np.zeros(count, np.int64), np.arange(count), settings)
        self._votes = VoteWindow(count, settings.votes)

    def read(self, features: StepFeatures, step_s: float) -> CauseEvidence:
        """Judge one step, whose usual length is `step_s`. Nothing is known without reports, or of one replica."""
        count = self._votes.columns
        factors = np.full(count, np.nan)
        if features.work is not None and count > 1:
            found = features.work.of_replicas
            factors[: len(found)] = found
        reading = self._channel.read(factors, LIMITS, np.zeros(count))
        self._votes.add(reading.over, reading.known)
        occurrence_s = reading.excess * filled(self._of_replicas(features.passes_s))
        excess_s = occurrence_s * filled(self._of_replicas(features.forwards / self._chunks))
        return CauseEvidence(
            cause=Cause.DATA_IMBALANCE,
            over=reading.over,
            votes=self._votes.count,
            excess_s=excess_s,
            occurrence_s=occurrence_s,
            ratio=reading.ratio,
            strength=reading.strength,
            by_history=reading.by_history,
            harmful=excess_s >= self._settings.harm * step_s,
        )

    def _of_replicas(self, values: Floats) -> Floats:
        """Return the median over the ranks of each replica."""
        known = np.isfinite(values)
        return segment_medians(self._replica_of[known], values[known], self._votes.columns)
