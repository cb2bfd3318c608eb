"""Devices that wait for their host to launch kernels, which is no slowness of the device.

A host that runs ahead of its device costs nothing. Once it loses the lead (it stalled, or its processor is crowded),
the device waits inside its spans, and they last as long as launching does. The lead is recorded with every span, so the
time of the device and that of the host are separated without a guess.
"""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.baseline import Mask
from megatronapp_analyzer.detect.compute_channel import LogChannel
from megatronapp_analyzer.detect.evidence_channels import COUPLED_CAP, ChannelReading
from megatronapp_analyzer.detect.features import Floats, StepFeatures
from megatronapp_analyzer.detect.settings import DetectorSettings
from megatronapp_analyzer.detect.units import Units
from megatronapp_analyzer.model import JobLayout

LAUNCH_SHARE = 0.2
"""Part of a step that late launches must cost a host to be evidence against it; leads are lost all the time."""
LEAST_RATIO = 1.1
"""Ratio from which a span is longer than usual in the cost of a stall."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchReading:
    """Judgement of launching in one step."""

    units: Units
    passes: ChannelReading
    """Per unit, its spans against history and peers; known only where its hosts keep ahead of their devices."""
    unknown: Mask
    """Units whose device's time is not known, because a member waits for launches and the others for that member."""
    late: ChannelReading
    """Per rank, seconds per FORWARD that its device's spans exceed the usual; known only where they wait for launches.
    """

    def added_to(self, stalls: ChannelReading) -> ChannelReading:
        """Return a host's stalls between spans together with its late launches within them."""
        over = stalls.over | self.late.over
        return dataclasses.replace(
            stalls,
            known=stalls.known | self.late.over,
            over=over,
            excess=np.where(stalls.over | ~over, stalls.excess, 0.0) + self.late_s,
            strength=np.maximum(stalls.strength, np.where(self.late.over, self.late.strength, 0.0)),
            by_history=np.where(self.late.over, self.late.by_history, stalls.by_history),
        )

    @property
    def late_s(self) -> Floats:
        """Seconds per FORWARD that are evidence against each rank's host."""
        return np.where(self.late.over, self.late.excess, 0.0)

    def lengthened(self, ranks: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
        """Return each rank with spans lengthened by late launches of `ranks`, and their length over the usual.

        Members of a unit meet inside every span, so that all of them wait for the one that launches late.
        """
        ratio = {int(self.units.of_rank[rank]): float(self.late.ratio[rank]) for rank in ranks}
        grown = {unit: times for unit, times in ratio.items() if times > LEAST_RATIO}
        return tuple((rank, times) for unit, times in grown.items() for rank in self.units.ranks(unit))


class LaunchBaseline:
    """Usual length of the spans of each unit, whether device or host decides it."""

    def __init__(self, layout: JobLayout, units: Units, settings: DetectorSettings) -> None:
        self._units = units
        self._chunks = layout.vpp
        self._settings = settings
        self._coupled = np.bincount(units.of_rank, minlength=len(units)) > 1
        self._channel = LogChannel(units.stage, units.replica, settings, cap=COUPLED_CAP)

    def read(self, features: StepFeatures, step_s: float, stalling: Mask) -> LaunchReading:
        """Judge one step.

        `step_s` is the usual length of a step, `stalling` are ranks whose host is suspected. On a processor's clock
        there are no launches.
        """
        values = self._units.slowest(features.passes_s)
        if not features.on_device:
            values = np.full(len(values), np.nan)
        usual = ~self._units.members_in(stalling)
        passes = self._channel.read(values, self._settings.device, np.zeros(len(values)), usual=usual)
        bound = self._units.members_in(features.bound)
        return LaunchReading(
            units=self._units,
            passes=passes.within(~bound),
            unknown=bound & self._coupled,
            late=self._late(passes, features, step_s),
        )

    def _late(self, passes: ChannelReading, features: StepFeatures, step_s: float) -> ChannelReading:
        """Judge late launches with the thresholds of a processor, because a host is one."""
        late = passes.at(self._units.of_rank).within(features.bound)
        excess = late.excess / self._chunks
        costly = (excess * features.forwards > LAUNCH_SHARE * step_s) & (
            late.ratio > self._settings.processor.compute_ratio
        )
        return dataclasses.replace(late, over=late.over & costly, excess=excess)
