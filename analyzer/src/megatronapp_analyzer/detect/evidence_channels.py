"""Channels: one kind of evidence each, judged column by column against history, the others, or peers.

A reading gives for every column its excess over what is healthy. Culprits and persistence are decided later.
"""

import dataclasses

import numpy as np

from megatronapp_analyzer.detect.baseline import ColumnHistory, Mask, median_of_others, median_of_others_by
from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.detect.settings import DetectorSettings, NoiseLevel

SIGMA_CAP = 1.75
"""Noise never hides a slowdown beyond this factor; only persistence can hold it back."""
COUPLED_CAP = 2.0
"""The same for ranks that meet inside spans, where run-queue delays of network threads are not recorded."""
SHARE_CAP = 2.0
"""Noise never hides a delay beyond this multiple of the smallest one that is named."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChannelReading:
    """One step's judgement of every column of a channel."""

    known: Mask
    """Columns with a value and a reference."""
    over: Mask
    excess: Floats
    """Seconds beyond the expected value, per microbatch or message."""
    ratio: Floats
    """Value over expected value; 1 for delays, which have no scale of their own."""
    strength: Floats
    """Excess over its threshold: above 1 is over."""
    by_history: Mask
    """True where the column is judged by its own history, false where by peers."""

    def or_else(self, other: "ChannelReading") -> "ChannelReading":
        """Return this reading where it is known, and the other one in all other columns."""
        first = self.known
        return ChannelReading(
            known=first | other.known,
            over=np.where(first, self.over, other.over),
            excess=np.where(first, self.excess, other.excess),
            ratio=np.where(first, self.ratio, other.ratio),
            strength=np.where(first, self.strength, other.strength),
            by_history=np.where(first, self.by_history, other.by_history),
        )

    def within(self, columns: Mask) -> "ChannelReading":
        """Return the same reading with all other columns unknown."""
        return dataclasses.replace(
            self,
            known=self.known & columns,
            over=self.over & columns,
            excess=np.where(columns, self.excess, 0.0),
            ratio=np.where(columns, self.ratio, 1.0),
            strength=np.where(columns, self.strength, 0.0),
        )

    def at(self, columns: Ints) -> "ChannelReading":
        """Return the reading of `columns`, in that order."""
        return ChannelReading(**{field.name: getattr(self, field.name)[columns] for field in dataclasses.fields(self)})


class DelayChannel:
    """Seconds that should not be there (stalls, idle time, late delivery): judged by what they cost of a step."""

    def __init__(self, peers: Ints, settings: DetectorSettings, *, weight: float = 1.0) -> None:
        """`peers` numbers the columns that compare without history; -1 for those that never do."""
        self._peers = peers
        self._settings = settings
        self._weight = weight
        self._history = ColumnHistory(len(peers), settings.window)

    def read(self, values_s: Floats, budget_s: Floats, noise: NoiseLevel, doubt_s: Floats) -> ChannelReading:
        """Judge one step.

        `budget_s` is the usual step time per occurrence of each column. `doubt_s` is the amount by which each value may
        be too large.
        """
        warm = self._history.count >= self._settings.min_history
        own = np.where(warm, values_s - self._history.median(), np.nan)
        common = np.maximum(np.nan_to_num(median_of_others(own)), 0.0)
        cold = np.where(self._peers >= 0, values_s - median_of_others_by(values_s, self._peers), np.nan)
        delay = np.where(warm, own - common, cold)
        threshold = np.where(warm, self._threshold(budget_s, noise), self._weight * noise.cold_share * budget_s)
        threshold = np.maximum(threshold, self._weight * noise.share * budget_s + doubt_s)
        known = np.isfinite(delay) & np.isfinite(threshold)
        over = known & (delay > threshold)
        self._history.add(values_s, ~over)
        delay = np.where(known, delay, 0.0)
        return ChannelReading(
            known=known,
            over=over,
            excess=np.maximum(delay, 0.0),
            ratio=np.ones(len(delay)),
            strength=np.where(known, delay / threshold, 0.0),
            by_history=warm,
        )

    def grow(self, peers: Ints) -> None:
        """Add columns for new peers."""
        self._peers = peers
        self._history.grow(len(peers))

    def _threshold(self, budget_s: Floats, noise: NoiseLevel) -> Floats:
        least = self._weight * noise.share * budget_s
        spread = self._settings.sigmas * np.nan_to_num(self._history.deviation())
        bound: Floats = np.clip(spread, least, SHARE_CAP * least)
        return bound
