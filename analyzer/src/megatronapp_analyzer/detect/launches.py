"""Devices that wait for their host to launch kernels: no slowness of their own, whatever their spans look like.

A host that runs ahead of its device costs nothing. Once it loses the lead (it stalled, or its processor is crowded),
the device waits inside its spans, and they last as long as launching does. The lead is recorded with every span, so
what the device takes and what the host takes are told apart without a guess.
"""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask
from megatronapp_analyzer.detect.candidates import Candidate
from megatronapp_analyzer.detect.channels import COUPLED_CAP, LogChannel, Reading
from megatronapp_analyzer.detect.features import Floats, StepFeatures
from megatronapp_analyzer.detect.settings import Settings
from megatronapp_analyzer.detect.units import Units

LAUNCH_SHARE = 0.2
"""Part of a step that late launches must cost a host to speak against it: a lead is lost and won back all the time."""
LEAST_RATIO = 1.1
"""From where on spans count as longer than usual in the cost of a stall."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchReading:
    """One step's judgement of what launching takes."""

    passes: Reading
    """Per unit, its spans against history and peers; known only where its hosts keep ahead of their devices."""
    bound_units: Mask
    late: Reading
    """Per rank, how much longer than usual its device's spans are; known only where they wait for launches."""

    def added_to(self, stalls: Reading) -> Reading:
        """A host's stalls between spans together with its late launches within them."""
        over = stalls.over | self.late.over
        excess = np.where(stalls.over | ~over, stalls.excess, 0.0) + np.where(self.late.over, self.late.excess, 0.0)
        return dataclasses.replace(
            stalls,
            known=stalls.known | self.late.over,
            over=over,
            excess=excess,
            strength=np.maximum(stalls.strength, np.where(self.late.over, self.late.strength, 0.0)),
            by_history=np.where(self.late.over, self.late.by_history, stalls.by_history),
        )


class Launches:
    """Usual length of the spans of each unit, whoever decides it."""

    def __init__(self, units: Units, settings: Settings) -> None:
        self._units = units
        self._settings = settings
        self._channel = LogChannel(units.stage, settings, cap=COUPLED_CAP)

    def read(self, features: StepFeatures, step_s: float, stalling: Mask) -> LaunchReading:
        """Judge one step; `step_s` is the usual length of a step, `stalling` are ranks whose host is suspected.

        On a processor's clock there are no launches.
        """
        values = self._units.slowest(features.passes_s)
        if not features.on_device:
            values = np.full(len(values), np.nan)
        usual = ~self._units.any(stalling)
        passes = self._channel.read(values, self._settings.processor, np.zeros(len(values)), usual=usual)
        bound = self._units.any(features.bound)
        late = passes.at(self._units.of_rank).within(features.bound)
        costly = late.excess * features.forwards > LAUNCH_SHARE * step_s
        return LaunchReading(
            passes=passes.within(~bound),
            bound_units=bound,
            late=dataclasses.replace(late, over=late.over & costly),
        )


def with_launches(host: Candidate, late: Reading) -> Candidate:
    """A stalling host with how much longer its device's spans are for it."""
    ratios = [(rank, float(late.ratio[rank])) for rank in host.subject.ranks if late.ratio[rank] > LEAST_RATIO]
    return dataclasses.replace(host, late=tuple(ratios), launch_s=_most(late.excess * late.over, host.subject.ranks))


def _most(values: Floats, ranks: tuple[int, ...]) -> float:
    return float(values[list(ranks)].max())
