"""Channel of compute time: units that have become slow, or have been slow from the start, in logarithms of seconds."""

import math

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask, filled
from megatronapp_analyzer.detect.evidence_channels import SIGMA_CAP, ChannelReading
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings, NoiseLevel
from megatronapp_analyzer.detect.statistics.two_references import ReferenceLimits, TwoReferences

LARGEST_STEP = 1.0
"""Largest change, in logarithms, that a level learns from."""


class LogChannel:
    """Compute time of units against two references at once, those of their stage and their own level."""

    def __init__(self, peers: Ints, replicas: Ints, settings: DetectorSettings, *, cap: float = SIGMA_CAP) -> None:
        self._cap = cap
        self._test = TwoReferences(peers, settings, replicas=replicas)

    def read(
        self, values_s: Floats, noise: NoiseLevel, doubt_s: Floats, *, usual: Mask | None = None
    ) -> ChannelReading:
        """Judge one step, and learn from what is healthy.

        `doubt_s`: what each value may be too large by. `usual`: columns that may be learned from, if not all.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(values_s)
        limits = ReferenceLimits(
            floor=noise.compute_floor,
            own=math.log(noise.compute_ratio),
            peers=math.log(noise.peer_ratio),
            cap=math.log(self._cap),
            peer_spread=noise.peer_spread,
            least_peer_spread=noise.least_peer_spread,
            largest_step=LARGEST_STEP,
        )
        found = self._test.read(logs, limits, lambda shift: _doubt(doubt_s, values_s, shift), usual=usual)
        return ChannelReading(
            known=found.known,
            over=found.over,
            excess=filled(values_s) * (1.0 - np.exp(-found.size)),
            ratio=np.exp(found.size),
            strength=found.strength,
            by_history=found.by_history,
        )


def _doubt(doubt_s: Floats, values_s: Floats, shift: Floats) -> Floats:
    """Return by how much a shift may be too large, in logarithms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        out: Floats = np.log1p(filled(doubt_s / (values_s * np.exp(-shift))))
    return out
